// Markdown as elements. A model's text becomes text nodes and checked addresses, never markup.

import { copyText, make } from "./dom.js";
import { reparse } from "./markdown.js";

const shown = new WeakMap(); // element → what it shows, as markdown.js returns it

/** Shows Markdown in an element; of a text that grew, only what changed is touched. */
export function showMarkdown(element, text) {
  const before = shown.get(element);
  const after = reparse(before, text);
  patch(element, before?.nodes ?? [], after.nodes, renderBlock);
  shown.set(element, after);
}

/** Makes the children of an element those of `after`, with `make`; they are those of `before` now. */
function patch(element, before, after, make) {
  after.forEach((node, index) => {
    const old = before[index];
    if (old === node) return;
    const child = element.childNodes[index];
    if (child === undefined) element.append(make(node));
    else if (!isAlike(old, node)) child.replaceWith(make(node));
    else if (node.tag === "math") return;
    else if (typeof node !== "string") patch(inside(child, node), old.children, node.children, render);
    else if (node.startsWith(old)) child.appendData(node.slice(old.length));
    else child.data = node;
  });
  while (element.childNodes.length > after.length) element.lastChild.remove();
}

/** Whether one node becomes the other by its children alone. */
function isAlike(one, other) {
  return typeof one === typeof other
    && ["tag", "href", "language", "start", "align", "kind", "source", "isBlock"].every((name) => one[name] === other[name]);
}

/** The element that has a node's children. */
function inside(element, { tag }) {
  return tag === "pre" ? element.lastChild : tag === "table" ? element.firstChild : element;
}

/** Renders a block, whose first letters say in which direction it is read. */
function renderBlock(node) {
  const element = render(node);
  if (node.tag !== "pre") element.dir = "auto";
  return element;
}

function render(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "math") return renderMath(node);
  const { tag, href, language, start, align, kind } = node;
  const element = make(tag, {}, ...node.children.map(render));
  if (tag === "a") Object.assign(element, { href, target: "_blank", rel: "noopener noreferrer" });
  if (start > 1 || start === 0) element.start = start;
  if (kind) element.className = `code-${kind}`;
  if (align && align !== "left") element.className = align;
  if (tag === "pre") return code(element, language);
  return tag === "table" ? make("div", { className: "table", tabIndex: 0 }, element) : element;
}

/** Renders MathML; its tags and attributes are math.js's own, and what the model wrote is text. */
function renderMath(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", node.tag);
  for (const [name, value] of Object.entries(node.attributes)) element.setAttribute(name, value);
  element.append(...node.children.map(renderMath));
  return element;
}

/** Code with its language and a button that copies it. */
export function code(pre, language) {
  const button = copyButton("Copy", () => pre.textContent, pre);
  const head = make("div", { className: "row minor" }, make("span", {}, language), button);
  pre.tabIndex = 0; // so that the keyboard scrolls it
  return make("div", { className: "code", dir: "ltr" }, head, pre);
}

/** A button that copies a text; where the clipboard can't be used, it selects the text instead. */
export function copyButton(label, text, element) {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    const isCopied = await copyText(text());
    if (!isCopied) getSelection().selectAllChildren(element);
    button.textContent = isCopied || document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = label; }, 2000);
  });
  return button;
}
