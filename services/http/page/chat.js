// One conversation: its turns, and the answer that is being received.
//
// A turn is plain data, which is stored as it is: {question, or results of tool calls, reasoning,
// answer, calls, isUsable, isCut, summary, note, failure}. What shows it is its view.

import { events, request, sentence } from "./api.js";
import { $, format, make, setText } from "./dom.js";
import { code, copyButton, showMarkdown } from "./render.js";
import { requestFields, systemPrompt } from "./settings.js";

const MIN_TOKENS = 20; // of an answer whose speed is shown: chance decides that of fewer
const SAVE_MS = 2000; // between two saves of an answer that is being received

let conversation = null;
let stream = null; // AbortController of the answer that is being received
let changed = () => {};
const views = new WeakMap(); // turn → its elements

/** Sets what is called with a conversation that changed. */
export function onChange(callback) {
  changed = callback;
}

/** Shows a conversation in place of the one before, whose answer ends. */
export function show(next) {
  stop();
  conversation = next;
  $("log").querySelectorAll(".turn").forEach((element) => element.remove());
  next.turns.forEach(addView);
  $("empty").hidden = next.turns.length > 0;
  $("log").scrollTop = $("log").scrollHeight;
}

export const stop = () => stream?.abort();
export const isBusy = () => stream !== null;
/** Whether the user has begun to write within the conversation. */
export const isEdited = () => [...$("log").querySelectorAll(".editor:not([hidden]), .results textarea")]
  .some((element) => element.matches(".editor") || element.value);

/** Sends a question, or results of tool calls. */
export function ask({ question = null, results = null }) {
  const turn = { question, results, reasoning: "", answer: "", calls: [], isUsable: false, isCut: false, summary: "", note: "", failure: "" };
  if (!conversation.turns.length) conversation.title = question.slice(0, 80);
  conversation.turns.push(turn);
  addView(turn);
  $("empty").hidden = true;
  $("log").scrollTop = $("log").scrollHeight;
  return answer(turn);
}

// ---- views ----

/** Does something to the conversation and stays at its end, if the reader is there. */
function keepingEnd(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function addView(turn) {
  const element = $("turn").content.firstElementChild.cloneNode(true);
  const part = (name) => element.querySelector(name);
  const view = {
    element, user: part(".user"), editor: part(".editor"), thinking: part(".thinking"), answer: part(".answer"),
    calls: part(".calls"), failure: part(".failure"), retry: part(".retry"), note: part(".note"),
  };
  views.set(turn, view);
  const copy = copyButton("Copy answer", () => turn.answer, view.answer);
  copy.className = "copy-answer";
  view.retry.before(copy);
  view.retry.addEventListener("click", () => answer(turn));
  for (const { name, content } of turn.results ?? []) {
    view.user.append(make("div", { className: "minor" }, `Result of ${name}`), make("div", { dir: "auto" }, content));
  }
  if (turn.question !== null) addEditor(turn, view, part(".edit"));
  else part(".edit").remove();
  showAnswer(turn);
  showCalls(turn, true);
  showEnd(turn);
  $("log").append(element);
}

/** Lets the user change a question; what follows it is asked again. */
function addEditor(turn, { user, editor }, edit) {
  const input = editor.elements.question;
  const setOpen = (isOpen) => {
    [user.hidden, edit.hidden, editor.hidden] = [isOpen, isOpen, !isOpen];
    (isOpen ? input : edit).focus();
  };
  user.textContent = turn.question;
  edit.addEventListener("click", () => {
    input.value = turn.question;
    setOpen(true);
  });
  editor.addEventListener("reset", () => setOpen(false));
  editor.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!input.value.trim()) return;
    user.textContent = turn.question = input.value.trim();
    setOpen(false);
    if (conversation.turns[0] === turn) conversation.title = turn.question.slice(0, 80);
    answer(turn);
  });
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Escape") editor.reset();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    editor.requestSubmit();
  });
}

function showAnswer(turn) {
  const { thinking, answer } = views.get(turn);
  thinking.hidden = !turn.reasoning;
  setText(thinking.querySelector("summary"), turn.summary || "Thinking …");
  showMarkdown(thinking.querySelector(".text"), turn.reasoning);
  showMarkdown(answer, turn.answer);
}

/** Shows tool calls; whole ones have their arguments indented and, at the end, a form for results. */
function showCalls(turn, isWhole) {
  const { calls } = views.get(turn);
  turn.calls.forEach((call, index) => {
    const element = calls.children[index] ?? calls.appendChild(callView(call));
    setText(element.querySelector(".call-name"), call.name);
    setText(element.querySelector("pre"), isWhole ? indented(call.arguments) : call.arguments);
  });
  while (calls.children.length > turn.calls.length) calls.lastChild.remove();
  if (isWhole && turn.calls.length) calls.append(resultsForm(turn.calls));
}

function callView(call) {
  const head = make("div", { className: "minor" }, "Calls the tool ", make("b", { className: "call-name" }, call.name));
  return make("section", { className: "call" }, head, code(make("pre"), "arguments"));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch { // SyntaxError: the answer ended within the arguments
    return text;
  }
}

function resultsForm(calls) {
  const inputs = calls.map(({ name }) => make("textarea", { rows: 1, placeholder: "result", ariaLabel: `Result of ${name}` }));
  const form = make("form", { className: "results" }, ...inputs, make("button", { type: "submit" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (isBusy()) return;
    ask({ results: calls.map(({ id, name }, index) => ({ id, name, content: inputs[index].value })) });
  });
  return form;
}

/** Shows what a turn that isn't being answered offers. */
function showEnd(turn) {
  const { failure: place, retry, note } = views.get(turn);
  const failure = turn.failure ?? ""; // of an older conversation
  place.hidden = !failure;
  setText(place, failure);
  setText(note, turn.isCut ? "not whole: the page was closed, or another tab receives it" : turn.note);
  setText(retry, failure || !turn.isUsable ? "Try again" : "Regenerate");
}

// ---- requests ----

function userMessages({ question, results }) {
  if (question !== null) return [{ role: "user", content: question }];
  return results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
}

function assistantMessage({ answer, reasoning, calls }) {
  const tools = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return {
    role: "assistant", content: answer,
    ...(tools.length && { tool_calls: tools, reasoning_content: reasoning }),
  };
}

/** Returns the messages up to a turn; turns without a whole answer are left out. */
function messagesUntil(turn) {
  const before = conversation.turns.slice(0, conversation.turns.indexOf(turn)).filter((one) => one.isUsable);
  const system = systemPrompt() ? [{ role: "system", content: systemPrompt() }] : [];
  return [...system, ...before.flatMap((one) => [...userMessages(one), assistantMessage(one)]), ...userMessages(turn)];
}

function readChunk(turn, chunk, times) {
  const { delta = {}, finish_reason: finish } = chunk.choices[0] ?? {};
  turn.reasoning += delta.reasoning_content ?? "";
  turn.answer += delta.content ?? "";
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    const call = (turn.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id = id ?? call.id;
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
  const hasAnswer = turn.answer || turn.calls.length;
  if (turn.reasoning || hasAnswer) times.first ??= performance.now();
  if (hasAnswer && turn.reasoning) turn.summary ||= thoughtFor(times);
  times.finish = finish ?? times.finish;
  times.usage = chunk.usage ?? times.usage;
}

const thoughtFor = ({ first }) => `Thought for ${((performance.now() - first) / 1000).toFixed(1)} s`;

/** Returns what an answer cost: tokens, time to the first, rate of the others. */
function costs({ begin, first, finish, usage }) {
  if (!first) return "";
  const seconds = (performance.now() - first) / 1000;
  const facts = [`first text after ${format(first - begin)} ms`];
  if (usage) {
    facts.unshift(`${format(usage.completion_tokens)} tokens`);
    if (usage.completion_tokens >= MIN_TOKENS) facts.push(`${format((usage.completion_tokens - 1) / seconds)} tokens/s`);
  }
  if (finish === "length") facts.push("ended at the maximum number of tokens");
  return facts.join(" · ");
}

/** Calls `show` in a frame after a change; a slow one takes at most a quarter of the time. */
function painter(show) {
  let [timer, frame, due] = [0, 0, 0];
  const paint = () => {
    const begin = performance.now();
    show();
    [timer, due] = [0, 4 * performance.now() - 3 * begin];
  };
  const schedule = () => {
    timer ||= setTimeout(() => { frame = requestAnimationFrame(paint); }, Math.max(0, due - performance.now()));
  };
  return [schedule, () => { clearTimeout(timer); cancelAnimationFrame(frame); }];
}

/** Requests the answer of a turn and shows it as it is received; later turns are removed. */
async function answer(turn) {
  stop();
  const { signal } = (stream = new AbortController());
  const own = conversation;
  const times = { begin: performance.now(), saved: performance.now() };
  for (const later of own.turns.splice(own.turns.indexOf(turn) + 1)) views.get(later).element.remove();
  Object.assign(turn, { reasoning: "", answer: "", calls: [], isUsable: false, isCut: false, summary: "", note: "", failure: "" });
  const [schedule, cancel] = painter(() => {
    keepingEnd(() => {
      showAnswer(turn);
      showCalls(turn, false);
    });
    if (performance.now() - times.saved < SAVE_MS) return;
    times.saved = performance.now();
    changed(own);
  });
  showAnswer(turn);
  showCalls(turn, false);
  showEnd(turn);
  turn.isCut = true; // if nothing follows
  setBusy(turn, true, "The model answers.");
  changed(own);
  let failure = null;
  try {
    await receive(turn, times, signal, schedule);
  } catch (error) {
    failure = error;
  }
  cancel();
  keepingEnd(() => endTurn(turn, signal, failure, times));
  changed(own);
}

async function receive(turn, times, signal, schedule) {
  const body = { messages: messagesUntil(turn), stream: true, stream_options: { include_usage: true }, ...requestFields() };
  const headers = { "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", options);
  for await (const chunk of events(response)) {
    readChunk(turn, chunk, times);
    schedule();
  }
}

function endTurn(turn, signal, failure, times) {
  if (stream?.signal === signal) stream = null;
  const isWhole = failure === null;
  const isStopped = !isWhole && signal.aborted;
  turn.isUsable = isWhole || (isStopped && turn.answer !== "");
  turn.isCut = false;
  turn.failure = isWhole || isStopped ? "" : sentence(failure);
  turn.note = isStopped ? "stopped" : isWhole ? costs(times) : "";
  if (turn.reasoning && times.first) turn.summary ||= thoughtFor(times); // it may have ended while thinking
  showAnswer(turn);
  showCalls(turn, isWhole);
  showEnd(turn);
  setBusy(turn, false, isWhole ? "The answer is complete." : isStopped ? "Stopped." : "The answer failed.");
}

function setBusy(turn, isBusyNow, progress) {
  views.get(turn).element.setAttribute("aria-busy", isBusyNow);
  setText($("progress"), progress);
  if (isBusyNow || document.activeElement === $("stop")) $("prompt").focus(); // the focused button disappears
  $("send").hidden = stream !== null;
  $("stop").hidden = stream === null;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("prompt").value.trim();
  if (!question || isBusy()) return;
  $("prompt").value = "";
  ask({ question });
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("stop").addEventListener("click", stop);
for (const button of document.querySelectorAll("#demo button")) {
  button.addEventListener("click", () => isBusy() || ask({ question: button.textContent }));
}
