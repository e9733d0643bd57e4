// A chat with the model, and the pipeline behind it. Model text is only ever set as text.

import { showMarkdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const format = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // unchanged text is not read aloud again
}

// ---- requests ----

let apiKey = sessionStorage.getItem("penstock-api-key") ?? "";
let keyDialog = null;

/** Asks for the API key, once for all requests that lack it; resolves to whether it was given. */
function askForKey() {
  keyDialog ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (apiKey) setText($("key-reason"), "The server did not accept this API key.");
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      keyDialog = null;
      if (dialog.returnValue === "given") {
        apiKey = $("key").value;
        sessionStorage.setItem("penstock-api-key", apiKey);
      }
      resolve(dialog.returnValue === "given");
    }, { once: true });
  });
  return keyDialog;
}

/** What the server answers; where it refuses, an error with the server's sentence. */
async function request(path, options = {}) {
  const key = apiKey;
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
  if (response.status === 401 && (key !== apiKey || (await askForKey()))) return request(path, options);
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message ?? `${response.status} ${response.statusText}`);
}

/** What went wrong; fetch has one word, TypeError, for every broken connection. */
function sentence(error) {
  if (error.name === "TimeoutError") return "The server does not answer.";
  return error instanceof TypeError ? "The connection to the server broke." : error.message;
}

/** The chunks of a stream of server-sent events; an error if it ends without its end mark. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The stream broke off before its end.");
    const parts = (held + value).split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// ---- chat ----

let turns = [];
let stream = null; // the AbortController of the answer that comes

/** Does something to the conversation and stays at its end, if the reader is there. */
function keepingEnd(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function addTurn(question) {
  const element = $("turn").content.firstElementChild.cloneNode(true);
  const part = (name) => element.querySelector(name);
  const turn = {
    question, element,
    thinking: part(".thinking"), answerText: part(".answer"), failure: part(".failure"),
    retry: part(".retry"), note: part(".note"),
  };
  part(".user").textContent = question;
  turn.retry.addEventListener("click", () => answer(turn));
  $("empty").hidden = true;
  $("log").append(element);
  $("log").scrollTop = $("log").scrollHeight;
  turns.push(turn);
  return turn;
}

/** The conversation up to a turn; turns without a whole answer are left out. */
function messagesUntil(turn) {
  const before = turns.slice(0, turns.indexOf(turn)).filter((one) => one.isUsable);
  const said = before.flatMap((one) => [
    { role: "user", content: one.question },
    { role: "assistant", content: one.answer },
  ]);
  const system = $("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: turn.question }];
}

function chatBody(turn) {
  const [temperature, maxTokens] = [$("temperature").value, $("max-tokens").value];
  return JSON.stringify({
    messages: messagesUntil(turn),
    stream: true,
    stream_options: { include_usage: true },
    ...(temperature && { temperature: Number(temperature) }),
    ...(maxTokens && { max_tokens: Number(maxTokens) }),
    ...(!$("thinking").checked && { chat_template_kwargs: { enable_thinking: false } }),
  });
}

function readChunk(turn, chunk, times) {
  const { delta = {}, finish_reason: finish } = chunk.choices[0] ?? {};
  turn.reasoning += delta.reasoning_content ?? "";
  turn.answer += delta.content ?? "";
  if (turn.reasoning || turn.answer) times.first ??= performance.now();
  if (turn.answer) times.answer ??= performance.now();
  times.finish = finish ?? times.finish;
  times.usage = chunk.usage ?? times.usage;
}

function showAnswer(turn, times) {
  const seconds = times.answer && ((times.answer - times.first) / 1000).toFixed(1);
  turn.thinking.hidden = !turn.reasoning;
  setText(turn.thinking.querySelector("summary"), seconds ? `Thought for ${seconds} s` : "Thinking …");
  showMarkdown(turn.thinking.querySelector(".text"), turn.reasoning);
  showMarkdown(turn.answerText, turn.answer);
}

/** What an answer cost: tokens, time to the first, rate of the others. */
function costs({ begin, first, finish, usage }) {
  if (!first) return "";
  const seconds = (performance.now() - first) / 1000;
  const facts = [`first text after ${format(first - begin)} ms`];
  if (usage) {
    facts.unshift(`${format(usage.completion_tokens)} tokens`);
    if (usage.completion_tokens > 1) facts.push(`${format((usage.completion_tokens - 1) / seconds)} tokens/s`);
  }
  if (finish === "length") facts.push("ended at the most tokens");
  return facts.join(" · ");
}

/** Asks for the answer of a turn and shows it as it comes, at most once a frame. */
async function answer(turn) {
  stream?.abort();
  const { signal } = (stream = new AbortController());
  const times = { begin: performance.now() };
  let frame = 0;
  const update = () => {
    frame = 0;
    keepingEnd(() => showAnswer(turn, times));
  };
  Object.assign(turn, { reasoning: "", answer: "", isUsable: false });
  turn.failure.hidden = turn.retry.hidden = true;
  update();
  turn.note.textContent = "";
  setBusy(turn, true, "The model answers.");
  keep();
  let failure = null;
  try {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: chatBody(turn), signal };
    const response = await request("v1/chat/completions", options);
    for await (const chunk of events(response)) {
      readChunk(turn, chunk, times);
      frame ||= requestAnimationFrame(update);
    }
  } catch (error) {
    failure = error;
  }
  cancelAnimationFrame(frame);
  times.answer ??= performance.now(); // it may have ended while thinking
  update();
  keepingEnd(() => endTurn(turn, signal, failure, times));
}

function endTurn(turn, signal, failure, times) {
  if (stream?.signal === signal) stream = null;
  const isWhole = failure === null;
  const isStopped = !isWhole && signal.aborted;
  turn.isUsable = isWhole || (isStopped && turn.answer !== "");
  turn.note.textContent = isStopped ? "stopped" : isWhole ? costs(times) : "";
  turn.failure.hidden = turn.retry.hidden = isWhole || isStopped;
  if (!turn.failure.hidden) turn.failure.textContent = sentence(failure);
  setBusy(turn, false, isWhole ? "The answer is complete." : isStopped ? "Stopped." : "The answer failed.");
  keep();
}

function setBusy(turn, isBusy, progress) {
  turn.element.setAttribute("aria-busy", isBusy);
  $("progress").textContent = progress;
  if (isBusy || document.activeElement === $("stop")) $("prompt").focus(); // the button that has it goes
  $("send").hidden = stream !== null;
  $("stop").hidden = stream === null;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("prompt").value.trim();
  if (!question || stream) return;
  $("prompt").value = "";
  answer(addTurn(question));
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
addEventListener("keydown", (event) => event.key === "Escape" && stream?.abort());
$("stop").addEventListener("click", () => stream?.abort());
$("new").addEventListener("click", () => {
  stream?.abort();
  for (const turn of turns) turn.element.remove();
  turns = [];
  keep();
  $("empty").hidden = false;
  $("prompt").focus();
});

for (const button of document.querySelectorAll("#demo button")) {
  button.addEventListener("click", () => stream || answer(addTurn(button.textContent)));
}

// ---- what a reload keeps ----

const [CONVERSATION, SYSTEM] = ["penstock-conversation", "penstock-system"];
const DEMO = "qwen3-demo";

/** Keeps the conversation in this browser; where there is no room, its newest part. */
function keep() {
  const kept = turns.map(({ question, reasoning, answer, isUsable, note, thinking }) => {
    const summary = thinking.querySelector("summary").textContent;
    return { question, reasoning, answer, isUsable, note: note.textContent, summary };
  });
  for (; kept.length; kept.shift()) {
    try {
      localStorage.setItem(CONVERSATION, JSON.stringify(kept));
      return;
    } catch { /* QuotaExceededError: without the oldest turn */ }
  }
  localStorage.removeItem(CONVERSATION);
}

function restore() {
  $("system").value = localStorage.getItem(SYSTEM) ?? "";
  let kept = [];
  try {
    kept = JSON.parse(localStorage.getItem(CONVERSATION) ?? "[]");
  } catch { /* SyntaxError: nothing of ours */ }
  for (const { question, note, summary, ...rest } of kept) {
    const turn = Object.assign(addTurn(question), rest);
    showAnswer(turn, {});
    turn.thinking.querySelector("summary").textContent = summary;
    turn.note.textContent = note;
    turn.retry.hidden = turn.isUsable;
  }
}

$("system").addEventListener("change", () => localStorage.setItem(SYSTEM, $("system").value));
if (matchMedia("(max-width: 560px)").matches) $("settings").open = false;
restore();

// ---- pipeline ----

const [MINUTE, RATE_SECONDS] = [60, 2]; // rates are taken over the latter
const GONE_SECONDS = 10; // for which a process that left is still shown
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

/** All replicas as if they were one; undefined if no scheduler has reported. */
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
  if (Object.keys(next).some((name) => next[name] < samples.at(-1)?.[name])) samples.length = 0; // began anew
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
  const { prefix_cache_queries: queries, prefix_cache_hits: hits, request_success, request_failed } = metrics ?? {};
  const totals = [`${format(total(request_success))} answered`, `${format(total(request_failed))} refused or failed`];
  if (queries) totals.push(`${format((100 * hits) / queries)} % of prompt tokens from the prefix cache`);
  setText($("totals"), totals.join(" · "));
}

function duration(seconds) {
  const [days, hours, minutes] = [86400, 3600, 60].map((unit) => Math.floor(seconds / unit));
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

function tell(sentence) {
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
  shown.set(name, { element, base: null, cpu: null, goneAt: null });
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
    tell(`${process.name} was restarted: pid ${base.pid} is now ${process.pid}`);
    delete element.dataset.healed;
    element.offsetWidth; // so that the animation begins anew
    element.dataset.healed = "";
  }
  if (process.pid) updateCpu(entry, process);
  entry.goneAt = null;
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

function showGone(name, entry, now) {
  entry.goneAt ??= now;
  if (entry.element.dataset.state !== "gone") tell(`${name} is gone`);
  entry.element.dataset.state = "gone";
  setText(entry.element.querySelector(".load"), "gone");
  if (now - entry.goneAt < GONE_SECONDS) return;
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
  for (const [name, entry] of shown) if (!processes.has(name)) showGone(name, entry, now);
  showFlows();
}

async function fetchStatus(path) {
  const status = await (await request(path, { signal: AbortSignal.timeout(5000) })).json();
  if (!$("model").textContent) setText($("model"), (await (await request("v1/models")).json()).data[0].id);
  $("demo").hidden = $("model").textContent !== DEMO;
  return status;
}

/** Shows one status after the other; the server answers when there is news. */
async function watch() {
  for (let failures = 0; ;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    const begin = performance.now();
    const status = await fetchStatus(failures ? "status" : "status?fresh=true").catch((error) => error);
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

// ---- theme ----

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  localStorage.setItem("penstock-theme", theme);
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}
$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});

setTheme(localStorage.getItem("penstock-theme") ?? "auto");
new ResizeObserver(drawFlows).observe($("pipeline"));
watch();
