// Emphasis, code, formulas and links within a block of Markdown, in linear time. Unmatched marks stay text.

import { formula } from "./math.js";

const URL = String.raw`https?:\/\/[\w\-.~:/?#[\]@!$&'()*+,;=%]+`;
const TOKEN = new RegExp([
  String.raw`(?<plain>(?:[^\\${"`"}*_~[\]!<h$]|h(?!ttps?:\/\/))+)`,
  String.raw`(?<formula>\$\$?|\\[([])`,
  String.raw`\\(?<escaped>[${"`"}*_~#|<>+.!$-])`,
  "(?<ticks>`+)",
  String.raw`(?<marks>\*+|_+|~+)`,
  String.raw`(?<open>!?\[)`,
  String.raw`(?<close>\])`,
  `<(?<inside>${URL})>`,
  `(?<url>${URL})`,
  "(?<other>[^])",
].join("|"), "y");
const TARGET = /\(\s*((?:https?:\/\/|mailto:)[^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)(?:\s+"[^"\n]*")?\s*\)/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const CLOSING = { "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
const MAX_IN_LINE = 1000; // characters of a formula between single dollars
const PROSE = /\b[A-Za-z]{3,}[,.]? +[A-Za-z]{2,}/; // two words, as between two prices
const NAMED_TEXT = /\\(?:text\w*|mathrm|operatorname|mbox)\s*\{[^{}]*\}/g;
const AFTER_DOLLAR = /^(?:th|st|nd|rd|s)?(?![A-Za-z0-9])/;
const MAX_OPEN = 32; // marks that are open at a time; further ones are text

const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);
const isSpace = (character) => character === undefined || /\s/.test(character);

/** Returns the nodes of a text. */
export function inline(text) {
  const state = { text, at: 0, nodes: [], open: [], ticks: null, unclosed: new Set() };
  while (state.at < text.length) {
    const begin = (TOKEN.lastIndex = state.at);
    const { groups } = TOKEN.exec(text);
    state.at = TOKEN.lastIndex;
    const { plain, formula: begins, escaped, ticks, marks, open, close, inside, url, other } = groups;
    if (ticks) addCode(state, ticks.length);
    else if (begins) addFormula(state, begins, begin);
    else if (marks) addMarks(state, marks, begin);
    else if (open) addOpen(state, open);
    else if (close) addLink(state);
    else if (url) addUrl(state, url, begin);
    else if (inside) state.nodes.push({ tag: "a", href: inside, children: [inside] });
    else state.nodes.push(plain ?? escaped ?? other);
  }
  return joined(state.nodes);
}

/** Merges texts side by side; marks that are still open are texts. */
function joined(nodes) {
  const found = [];
  for (const node of nodes) {
    const text = typeof node === "string" ? node : node.mark;
    if (text === undefined) found.push(node);
    else if (typeof found.at(-1) === "string") found.push(found.pop() + text);
    else if (text) found.push(text);
  }
  return found;
}

/** Adds code up to the next run of as many backticks. */
function addCode(state, length) {
  const { text, at } = state;
  if (!state.ticks) {
    state.ticks = new Map();
    for (const { 0: run, index } of text.matchAll(/`+/g)) {
      if (!state.ticks.has(run.length)) state.ticks.set(run.length, []);
      state.ticks.get(run.length).push(index);
    }
    for (const positions of state.ticks.values()) positions.reverse();
  }
  const positions = state.ticks.get(length);
  while (positions?.length && positions.at(-1) < at) positions.pop();
  if (!positions?.length) {
    state.nodes.push("`".repeat(length));
    return;
  }
  const end = positions.pop();
  const code = text.slice(at, end).replaceAll("\n", " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  state.nodes.push({ tag: "code", children: [isPadded ? code.slice(1, -1) : code] });
  state.at = end + length;
}

/** Adds a formula, or what would begin it if it has no end. */
function addFormula(state, opening, begin) {
  const end = opening === "$" ? dollarEnd(state, begin) : closingOf(state, opening);
  if (end < 0) {
    state.nodes.push(opening);
    return;
  }
  const source = state.text.slice(state.at, end);
  const isBlock = opening === "$$" || opening === "\\[";
  state.nodes.push({ ...formula(source, isBlock), source, isBlock });
  state.at = end + opening.length;
}

function closingOf(state, opening) {
  if (state.unclosed.has(opening)) return -1;
  const end = state.text.indexOf(CLOSING[opening], state.at);
  if (end < 0) state.unclosed.add(opening); // nor do later ones end
  return state.text.slice(state.at, end).trim() ? end : -1;
}

/** Returns where a formula between single dollars ends, by rules with which prices stay text; or -1. */
function dollarEnd({ text, at }, begin) {
  if (isSpace(text[at]) || /[A-Za-z0-9]/.test(text[begin - 1] ?? "")) return -1;
  let end = at;
  while (end < text.length && text[end] !== "$" && text[end] !== "\n") end += text[end] === "\\" ? 2 : 1;
  const source = text.slice(at, end);
  const isEnd = text[end] === "$" && source.length <= MAX_IN_LINE && !isSpace(text[end - 1]) && AFTER_DOLLAR.test(text.slice(end + 1, end + 4));
  return isEnd && !source.includes("`") && !PROSE.test(source.replace(NAMED_TEXT, "")) ? end : -1;
}

/** Opens or closes emphasis; marks within words are text, except `**` and `~~`. */
function addMarks(state, marks, begin) {
  const [before, after] = [state.text[begin - 1], state.text[state.at]];
  const isFree = marks === "**" || marks === "~~";
  const opens = !isSpace(after) && (isFree || !isWord(before));
  const closes = !isSpace(before) && (isFree || !isWord(after));
  const parts = marks.length === 3 ? [marks.slice(0, 2), marks[0]] : [marks];
  if (!parts.every((part) => TAGS[part])) state.nodes.push(marks);
  else for (const part of closes ? parts.reverse() : parts) addMark(state, part, opens, closes);
}

function addMark(state, mark, opens, closes) {
  const children = closes ? closed(state, mark) : null;
  if (children?.length) state.nodes.push({ tag: TAGS[mark], children: joined(children) });
  else if (children) state.nodes.push(mark, mark);
  else if (opens) addOpen(state, mark);
  else state.nodes.push(mark);
}

function addOpen(state, mark) {
  const node = { mark };
  if (state.open.length < MAX_OPEN) state.open.push({ mark, index: state.nodes.length });
  state.nodes.push(node);
}

/** Removes the last opening mark and what follows; returns the latter, or null without such a mark. */
function closed(state, ...marks) {
  const last = state.open.findLastIndex((one) => marks.includes(one.mark));
  if (last < 0) return null;
  const [{ index }] = state.open.splice(last);
  return state.nodes.splice(index).slice(1);
}

/** Ends what a bracket began: a link if its target follows. A link has no link within. */
function addLink(state) {
  const last = state.open.findLastIndex(({ mark }) => mark === "[" || mark === "![");
  TARGET.lastIndex = state.at;
  const target = last < 0 ? null : TARGET.exec(state.text);
  if (!target) {
    if (last >= 0) state.open.splice(last, 1);
    state.nodes.push("]");
    return;
  }
  const label = joined(closed(state, "[", "![")).flatMap((node) => (node.tag === "a" ? node.children : [node]));
  const href = target[1];
  state.nodes.push({ tag: "a", href, children: label.length ? label : [href] });
  state.open = state.open.filter(({ mark }) => !mark.endsWith("["));
  state.at = TARGET.lastIndex;
}

/** Adds a bare address without the punctuation at its end. */
function addUrl(state, url, begin) {
  let end = url.length;
  let excess = url.split(")").length - url.split("(").length; // of closing brackets
  while (".,;:!?'*_~]&".includes(url[end - 1]) || (url[end - 1] === ")" && excess > 0)) {
    end -= 1;
    if (url[end] === ")") excess -= 1;
  }
  const href = url.slice(0, end);
  state.nodes.push({ tag: "a", href, children: [href] });
  state.at = begin + end;
}
