// The pipeline's processes and what flows between them, from /status.

import { request, sentence } from "./api.js";
import { $, format, setText, sleep } from "./dom.js";

const DEMO = "qwen3-demo";

const [MINUTE, RATE_SECONDS] = [60, 2]; // rates are taken over the latter
const EXITED_SECONDS = 10; // for which a process that left is still shown
const samples = []; // of the counters, one for each status, a minute back
const rates = []; // [seconds, output tokens a second], a minute back
const shown = new Map(); // name → what is shown of a process

/** By how much a counter grew over some seconds, or what there is of them. */
function growth(name, seconds) {
  const last = samples.at(-1);
  const first = samples.findLast((one) => last.now - one.now >= seconds) ?? samples[0];
  return last[name] - first[name];
}

function rate(name) {
  const seconds = growth("now", RATE_SECONDS);
  return seconds && growth(name, RATE_SECONDS) / seconds;
}

/** Returns the sum of all replicas; undefined if no scheduler has reported. */
function merged({ schedulers }) {
  const sum = (of) => schedulers.reduce((total, one) => total + one[of], 0);
  const counts = ["num_steps", "num_running", "num_waiting", "num_blocks", "num_free_blocks"];
  return schedulers.length ? Object.fromEntries(counts.map((name) => [name, sum(name)])) : undefined;
}

function sample(status, now) {
  const { metrics } = status;
  const scheduler = merged(status);
  const ttft = metrics?.time_to_first_token_seconds;
  const next = {
    now,
    tokens: metrics?.generation_tokens ?? 0,
    prompt: metrics?.prompt_tokens ?? 0,
    steps: scheduler?.num_steps ?? 0,
    ttftSum: ttft?.sum ?? 0,
    ttftCount: ttft?.counts.reduce((sum, count) => sum + count, 0) ?? 0,
  };
  if (Object.keys(next).some((name) => next[name] < samples.at(-1)?.[name])) samples.length = 0; // the gateway restarted
  samples.push(next);
  rates.push([now, rate("tokens")]);
  for (const list of [samples, rates]) while (now - (list[0].now ?? list[0][0]) > MINUTE) list.shift();
}

function showTiles(status, now) {
  const { metrics } = status;
  const scheduler = merged(status);
  const total = (counts) => Object.values(counts ?? {}).reduce((sum, count) => sum + count, 0);
  setText($("tokens-per-second"), format(rate("tokens")));
  const most = Math.max(1, ...rates.map(([, value]) => value));
  const points = rates.map(([at, value]) => `${120 - (now - at) * 2},${23 - (22 * value) / most}`);
  $("sparkline").firstElementChild.setAttribute("points", points.join(" "));

  setText($("running"), scheduler ? format(scheduler.num_running) : "–");
  setText($("waiting"), scheduler ? `+ ${format(scheduler.num_waiting)} waiting` : "");
  const usage = scheduler?.num_blocks ? 1 - scheduler.num_free_blocks / scheduler.num_blocks : 0;
  setText($("kv-usage"), scheduler ? `${format(usage * 100)} %` : "–");
  $("kv-bar").setAttribute("aria-valuenow", Math.round(usage * 100));
  $("kv-bar").firstElementChild.style.width = `${usage * 100}%`;

  const [sum, count] = [growth("ttftSum", MINUTE), growth("ttftCount", MINUTE)];
  setText($("ttft"), count ? `${format((sum / count) * 1000)} ms` : "–");
  const { prompt_tokens: queries, prefix_cache_hits: hits, request_success } = metrics ?? {};
  const totals = [`${format(total(request_success))} answered`];
  if (queries) totals.push(`${format((100 * hits) / queries)} % of prompt tokens from the prefix cache`);
  setText($("totals"), totals.join(" · "));
}

function duration(seconds) {
  const [days, hours, minutes] = [86400, 3600, 60].map((unit) => Math.floor(seconds / unit));
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

function addEvent(sentence) {
  const textContent = `${new Date().toLocaleTimeString()}  ${sentence}`;
  $("events").append(Object.assign(document.createElement("div"), { textContent }));
  while ($("events").children.length > 5) $("events").firstElementChild.remove();
}

/** Processes by name: those of the supervisor, and those that only the gateway knows. */
function processesOf({ processes, tokenizers, schedulers }) {
  const behind = schedulers.flatMap((one) => [...Object.keys(one.detokenizers), ...one.workers]);
  const names = [...Object.keys(tokenizers), ...behind];
  return new Map([...names.map((name) => [name, { name }]), ...processes.map((one) => [one.name, one])]);
}

/** Who is at work: name → requests it has (undefined: nobody counts them). */
function workOf({ num_requests, tokenizers, schedulers }) {
  const work = { "gateway.1": num_requests, ...tokenizers };
  for (const { replica, num_waiting, num_running, workers, detokenizers } of schedulers) {
    work[`scheduler.${replica + 1}`] = num_waiting + num_running;
    for (const name of workers) work[name] = undefined;
    for (const [name, number] of Object.entries(detokenizers)) work[name] = (work[name] ?? 0) + number;
  }
  return work;
}

function addProcess(name) {
  const kind = name.split(".")[0];
  const list = document.querySelector(`.stage[data-kind="${kind}"] ul`);
  const element = $("process").content.firstElementChild.cloneNode(true);
  element.querySelector(".name").textContent = name;
  element.dataset.name = name;
  const next = [...list.children].find((one) => one.dataset.name.localeCompare(name, "en", { numeric: true }) > 0);
  list.insertBefore(element, next ?? null);
  shown.set(name, { element, base: null, cpu: null, exitedAt: null });
  return shown.get(name);
}

/** CPU use in percent, over at least a second of the supervisor's clock. */
function updateCpu(entry, process) {
  if (entry.base?.pid !== process.pid) [entry.base, entry.cpu] = [process, null];
  const seconds = process.uptime - entry.base.uptime;
  if (seconds < 1) return;
  entry.cpu = (100 * ((process.cpu_seconds ?? 0) - (entry.base.cpu_seconds ?? 0))) / seconds;
  entry.base = process;
}

function showProcess(process, work) {
  const entry = shown.get(process.name) ?? addProcess(process.name);
  const { element, base } = entry;
  if (base && process.pid && process.pid !== base.pid) {
    addEvent(`${process.name} was restarted: pid ${base.pid} is now ${process.pid}`);
    delete element.dataset.healed;
    element.offsetWidth; // so that the animation starts again
    element.dataset.healed = "";
  }
  if (process.pid) updateCpu(entry, process);
  entry.exitedAt = null;
  const isInPlace = process.name in work || process.name.startsWith("http.");
  const requests = work[process.name];
  element.dataset.state = isInPlace ? "running" : "starting";
  const load = [
    !isInPlace && "not in place",
    requests !== undefined && `${format(requests)} request${requests === 1 ? "" : "s"}`,
    process.pid && entry.cpu !== null && `CPU ${format(entry.cpu)} %`,
  ];
  setText(element.querySelector(".restarts"), process.restarts ? `restarted ${process.restarts}×` : "");
  setText(element.querySelector(".where"), process.pid ? `pid ${process.pid} · ${duration(process.uptime)}` : "");
  setText(element.querySelector(".load"), load.filter(Boolean).join(" · "));
}

function showExited(name, entry, now) {
  entry.exitedAt ??= now;
  if (entry.element.dataset.state !== "exited") addEvent(`${name} exited`);
  entry.element.dataset.state = "exited";
  setText(entry.element.querySelector(".load"), "exited");
  if (now - entry.exitedAt < EXITED_SECONDS) return;
  entry.element.remove();
  shown.delete(name);
}

// from, where along its width, to, where, what runs there, its label, the label's side
const FLOWS = [
  ["http", 0.44, "gateway", 0.44, "prompt"],
  ["gateway", 0.56, "http", 0.56, "tokens"],
  ["gateway", 0.3, "tokenizer", 0.5, "prompt"],
  ["tokenizer", 0.5, "scheduler", 0.3, "prompt", "prompt tokens/s", "end"],
  ["scheduler", 0.44, "worker", 0.4714, "steps", "steps/s", "end"],
  ["worker", 0.5286, "scheduler", 0.56, "tokens"],
  ["scheduler", 0.7, "detokenizer", 0.5, "tokens", "tokens/s", "start"],
  ["detokenizer", 0.5, "gateway", 0.7, "tokens"],
];

const svg = (name) => $("flows").appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
const flows = FLOWS.map((flow) => ({ flow, line: svg("path"), pulse: svg("path"), label: svg("text") }));

function drawFlows() {
  const origin = $("pipeline").getBoundingClientRect();
  const box = (kind) => document.querySelector(`.stage[data-kind="${kind}"]`).getBoundingClientRect();
  for (const { flow: [from, fromX, to, toX, , , side], line, pulse, label } of flows) {
    const [a, b] = [box(from), box(to)];
    const isDown = a.top < b.top;
    const [x1, x2] = [a.left + a.width * fromX - origin.left, b.left + b.width * toX - origin.left];
    const [y1, y2] = [(isDown ? a.bottom : a.top) - origin.top, (isDown ? b.top : b.bottom) - origin.top];
    const middle = (y1 + y2) / 2;
    for (const path of [line, pulse]) path.setAttribute("d", `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`);
    label.setAttribute("x", side === "end" ? Math.min(x1, x2) - 10 : Math.max(x1, x2) + 10);
    label.setAttribute("y", middle + 4);
    label.setAttribute("text-anchor", side ?? "start");
  }
}

function showFlows() {
  for (const { flow: [, , , , counter, unit], pulse, label } of flows) {
    const value = rate(counter);
    pulse.dataset.rate = value ? Math.min(4, Math.max(1, Math.ceil(Math.log10(value)))) : 0;
    setText(label, unit && value ? `${format(value)} ${unit}` : "");
  }
  drawFlows();
}

function show(status) {
  const now = performance.now() / 1000;
  $("state").dataset.state = status.ready ? "ready" : "waiting";
  setText($("state"), status.ready ? "ready" : "not ready: a stage is missing");
  sample(status, now);
  showTiles(status, now);
  const [processes, work] = [processesOf(status), workOf(status)];
  for (const process of processes.values()) showProcess(process, work);
  for (const [name, entry] of shown) if (!processes.has(name)) showExited(name, entry, now);
  showFlows();
}

/** Shows the model's name, or a choice where the server has several. */
function showModels(names) {
  setText($("model"), names[0]);
  $("demo").hidden = !names.includes(DEMO);
  if (names.length === 1) return;
  $("model-choice").replaceChildren(...names.map((name) => new Option(name)));
  [$("model").hidden, $("model-choice").hidden] = [true, false];
}

async function fetchStatus() {
  const status = await (await request("status", { signal: AbortSignal.timeout(5000) })).json();
  if (!$("model").textContent) showModels((await (await request("v1/models")).json()).data.map(({ id }) => id));
  return status;
}

/** Shows one status after the other; the server answers when there is news. */
export async function watch() {
  for (let failures = 0; ;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    const begin = performance.now();
    const status = await fetchStatus().catch((error) => error);
    failures = status instanceof Error ? failures + 1 : 0;
    const wait = failures ? Math.min(8, 0.25 * 2 ** failures) : 0.4;
    if (failures) showLost(`${sentence(status).replace(/\.$/, "")}; next try in ${wait} s`);
    else show(status);
    await sleep(wait * 1000 - (performance.now() - begin)); // however soon it answers
  }
}

function showLost(sentence) {
  $("state").dataset.state = "lost";
  setText($("state"), sentence);
}

new ResizeObserver(drawFlows).observe($("pipeline"));
