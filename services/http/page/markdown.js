// Markdown as a tree of plain objects, in linear time. This module needs no browser.
//
// A node is a string (text) or {tag, children}; `a` has an href of http(s) or mailto, `ol` a start,
// `code` blocks a language, their `span` a kind, cells an align, `math` a source. HTML in the text
// stays text.

import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const TASK = /^\[([ xX])\]\s/;
const MAX_NESTING = 12; // lists and quotes that are deeper are text

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** Returns the nodes of a text. */
export function parse(text) {
  return reparse(null, text).nodes;
}

/** Returns {text, nodes, starts} of a text; of one that grew, only the last two blocks are parsed. */
export function reparse(before, text) {
  const kept = before && text.startsWith(before.text) ? Math.max(0, before.nodes.length - 2) : 0;
  const from = kept ? before.starts[kept] : 0;
  const nodes = kept ? before.nodes.slice(0, kept) : [];
  const starts = kept ? before.starts.slice(0, kept) : [];
  const lines = text.slice(from).split("\n");
  let offset = from;
  let counted = 0;
  for (const [start, node] of blocks(lines, 0)) {
    for (; counted < start; counted += 1) offset += lines[counted].length + 1;
    nodes.push(node);
    starts.push(offset);
  }
  return { text, nodes, starts };
}

/** Yields [number of its first line, node] of each block. */
function* blocks(lines, depth) {
  for (let start = 0; start < lines.length;) {
    if (isBlank(lines[start])) { start += 1; continue; }
    const [end, node] = blockAt(lines, start, depth);
    yield [start, node];
    start = end;
  }
}

const children = (lines, depth) => [...blocks(lines, depth)].map(([, node]) => node);
const isTable = (lines, at) => lines[at].includes("|") && DIVIDER.test(lines[at + 1] ?? "");

/** Whether a line ends the paragraph before it. */
function startsBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || FORMULA.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at)) return true;
  if (depth >= MAX_NESTING) return false;
  const number = line.match(ITEM)?.[2];
  return QUOTE.test(line) || (number !== undefined && !(parseInt(number) > 1));
}

function blockAt(lines, start, depth) {
  const first = lines[start];
  if (FENCE.test(first)) return fence(lines, start);
  const heading = first.match(HEADING);
  if (heading) {
    const text = first.slice(heading[0].length).trim().replace(/(^|\s)#+$/, "");
    return [start + 1, { tag: `h${Math.min(6, heading[1].length + 2)}`, children: inline(text.trim()) }];
  }
  if (RULE.test(first)) return [start + 1, { tag: "hr", children: [] }];
  if (isTable(lines, start)) return table(lines, start);
  if (depth < MAX_NESTING && QUOTE.test(first)) return quote(lines, start, depth);
  if (depth < MAX_NESTING && ITEM.test(first)) return list(lines, start, depth);
  let end = FORMULA.test(first) ? formulaEnd(lines, start) : start + 1;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines, end, depth)) end += 1;
  return [end, { tag: "p", children: inline(lines.slice(start, end).join("\n").trim()) }];
}

/** Returns the line after a formula, whose lines begin no other block; without its end, it ends before a blank line. */
function formulaEnd(lines, start) {
  const opening = lines[start].match(FORMULA)[1];
  const closing = opening === "$$" ? "$$" : "\\]";
  const begin = lines[start].indexOf(opening) + opening.length;
  let end = start;
  for (; end < lines.length && !isBlank(lines[end]); end += 1) {
    if (lines[end].includes(closing, end === start ? begin : 0)) return end + 1;
  }
  return end;
}

/** Code up to the closing fence, or to the end while it is still missing. */
function fence(lines, start) {
  const [, indent, mark, info] = lines[start].match(FENCE);
  let end = start + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && indentOf(line) < 4 && text === mark[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const dedent = (line) => line.slice(Math.min(indent.length, indentOf(line)));
  const text = lines.slice(start + 1, end).map(dedent).join("\n");
  return [Math.min(end + 1, lines.length), { tag: "pre", language: info.trim(), children: highlight(text, info.trim()) }];
}

function quote(lines, start, depth) {
  let end = start + 1;
  const isLazy = (at) => !isBlank(lines[at]) && !startsBlock(lines, at, depth);
  while (end < lines.length && (QUOTE.test(lines[end]) || isLazy(end))) end += 1;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [end, { tag: "blockquote", children: children(inner, depth + 1) }];
}

/** A list: what is indented by two or more belongs to the item above. */
function list(lines, start, depth) {
  const [, { length: indent }, mark] = lines[start].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = start;
  for (let at = start, gap = false; at < lines.length; at += 1) {
    const line = lines[at];
    if (isBlank(line)) { gap = true; items.at(-1).push(""); continue; }
    const item = line.match(ITEM);
    const isNext = item && item[1].length >= indent && item[1].length < indent + 2;
    if (isNext && (/\d/.test(item[2]) !== isOrdered || RULE.test(line))) break;
    if (isNext) items.push([line.slice(item[0].length)]);
    else if (indentOf(line) >= indent + 2) items.at(-1).push(line.slice(Math.min(indentOf(line), indent + mark.length + 1)));
    else if (!gap && !startsBlock(lines, at, depth)) items.at(-1).push(line);
    else break;
    gap = false;
    end = at + 1;
  }
  const node = { tag: isOrdered ? "ol" : "ul", children: items.map((item) => listItem(item, depth + 1)) };
  if (isOrdered) node.start = parseInt(mark);
  return [end, node];
}

/** An item; a paragraph that is alone or precedes a list needs no element of its own. */
function listItem(lines, depth) {
  const task = lines[0].match(TASK);
  if (task) lines[0] = (task[1] === " " ? "☐ " : "☑ ") + lines[0].slice(task[0].length);
  const [first, ...rest] = children(lines, depth);
  if (!first) return { tag: "li", children: [] };
  const isTight = first.tag === "p" && rest.every((node) => node.tag === "ul" || node.tag === "ol");
  return { tag: "li", children: [...(isTight ? first.children : [first]), ...rest] };
}

function table(lines, start) {
  const cells = (line) => {
    const found = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
    if (found.at(-1) === "") found.pop();
    return found;
  };
  const aligns = cells(lines[start + 1]).map((cell) => `${cell.startsWith(":") ? "l" : ""}${cell.endsWith(":") ? "r" : ""}`);
  const align = (index) => ({ r: "right", lr: "center" })[aligns[index]] ?? "left";
  const row = (tag, line) => ({
    tag: "tr", children: cells(line).map((cell, index) => ({ tag, align: align(index), children: inline(cell) })),
  });
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = lines.slice(start + 2, end).map((line) => row("td", line));
  const rows = [{ tag: "thead", children: [row("th", lines[start])] }, { tag: "tbody", children: body }];
  return [end, { tag: "table", children: rows }];
}
