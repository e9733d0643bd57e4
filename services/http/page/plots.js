// The metrics of the last minutes as plots, from /metrics of this server.

import { request } from "./api.js";
import { $, make, setText, sleep } from "./dom.js";
import { parseMetrics, pointOf, roundUp } from "./metrics.js";

const WINDOW_SECONDS = 300;
const SCRAPE_SECONDS = 2;
const RATE_SECONDS = 6; // rates and quantiles are those of the last scrapes together
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [150, 48, 8, 8, 20];

const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 1 ? 2 : value < 100 ? 1 : 0 });
const percent = (value) => `${count(value * 100)} %`;
const time = (value) => (value >= 1 ? `${count(value)} s` : value ? `${count(value * 1000)} ms` : "0");
const PLOTS = [
  { key: "tokens", title: "Tokens per second", lines: ["output", "prompt"], unit: count },
  { key: "ttft", title: "Time to first token", lines: ["median", "95 %"], unit: time },
  { key: "itl", title: "Inter-token latency", lines: ["median", "95 %"], unit: time },
  { key: "kv", title: "KV cache in use", lines: ["used"], unit: percent, top: 1 },
  { key: "requests", title: "Requests", lines: ["running", "waiting"], unit: count },
  { key: "ended", title: "Requests ended per second", lines: ["answered", "failed"], unit: count },
];
const points = []; // {at, …as pointOf returns}, oldest first
let pointedAt = null; // the time under the pointer

const svg = (name, attributes, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

const figures = PLOTS.map((plot) => {
  const drawing = svg("svg", { role: "img", height: HEIGHT });
  const values = plot.lines.map(() => make("b"));
  const legend = plot.lines.map((line, index) => make("span", { className: `line-${index}` }, `${line} `, values[index]));
  const caption = make("figcaption", {}, make("h2", {}, plot.title), ...legend);
  const figure = make("figure", {}, caption, drawing);
  drawing.addEventListener("pointermove", ({ offsetX }) => {
    const share = (offsetX - LEFT) / (drawing.clientWidth - LEFT - RIGHT);
    pointedAt = Math.round(performance.now() / 1000 - (1 - share) * WINDOW_SECONDS);
    drawPlots();
  });
  drawing.addEventListener("pointerleave", () => {
    pointedAt = null;
    drawPlots();
  });
  $("plots").append(figure);
  return { ...plot, drawing, values };
});

/** Draws what is known, if its view is shown. */
export function drawPlots() {
  if ($("metrics-view").hidden) return;
  const now = performance.now() / 1000;
  const chosen = pointedAt === null ? points.at(-1) : points.findLast(({ at }) => at <= pointedAt);
  for (const figure of figures) draw(figure, now, chosen);
}

function draw({ key, lines, unit, top, title, drawing, values }, now, chosen) {
  const width = drawing.clientWidth;
  const highest = Math.max(0, ...points.flatMap((point) => point[key].map((value) => value ?? 0)));
  const end = top ?? roundUp(highest);
  const x = (at) => LEFT + (1 - (now - at) / WINDOW_SECONDS) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (Math.min(value, end) / end) * (HEIGHT - TOP - BOTTOM);
  const parts = [0, 0.5, 1].flatMap((share) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share * end), y2: y(share * end) }),
    svg("text", { x: LEFT - 6, y: y(share * end) + 4, "text-anchor": "end" }, unit(share * end)),
  ]);
  for (const minutes of width < 420 ? [4, 2, 0] : [4, 3, 2, 1, 0]) {
    const label = minutes ? `−${minutes} min` : "now";
    parts.push(svg("text", { x: x(now - 60 * minutes), y: HEIGHT - 4, "text-anchor": minutes ? "middle" : "end" }, label));
  }
  lines.forEach((_, index) => parts.push(svg("path", { class: `line-${index}`, d: path(key, index, x, y) })));
  if (pointedAt !== null && chosen) parts.push(svg("line", { class: "pointed", x1: x(chosen.at), x2: x(chosen.at), y1: TOP, y2: HEIGHT - BOTTOM }));
  drawing.replaceChildren(...parts);
  const texts = lines.map((_, index) => (chosen?.[key][index] == null ? "–" : unit(chosen[key][index])));
  texts.forEach((text, index) => setText(values[index], text));
  drawing.setAttribute("aria-label", `${title}, last 5 minutes. ${lines.map((line, index) => `${line} ${texts[index]}`).join(", ")}`);
}

/** Returns a line with gaps where there is no value; a value between gaps is a dot. */
function path(key, index, x, y) {
  let isDown = false;
  return points.map(({ at, [key]: { [index]: value } }) => {
    const command = value == null ? "" : `${isDown ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${isDown ? "" : "h0.1"}`;
    isDown = value != null;
    return command;
  }).join("");
}

/** Scrapes while the page is visible. */
export async function watchMetrics() {
  const scrapes = []; // {at, samples} of the last seconds
  for (;;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    const begin = performance.now();
    const text = await request("metrics", { signal: AbortSignal.timeout(5000) }).then((one) => one.text(), () => null);
    if (text !== null) add(scrapes, { at: performance.now() / 1000, samples: parseMetrics(text) });
    drawPlots();
    await sleep(SCRAPE_SECONDS * 1000 - (performance.now() - begin));
  }
}

function add(scrapes, scrape) {
  while (scrapes.length > 1 && scrape.at - scrapes[1].at >= RATE_SECONDS) scrapes.shift();
  if (scrapes.length) points.push({ at: scrape.at, ...pointOf(scrapes[0].samples, scrape.samples, scrape.at - scrapes[0].at) });
  while (scrape.at - points[0]?.at > WINDOW_SECONDS) points.shift();
  scrapes.push(scrape);
}

new ResizeObserver(drawPlots).observe($("plots"));
