// Markdown as DOM nodes: text of a model is only ever set as text, and nothing is fetched for it.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
const INLINE = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s()]+)\)/g;
const MAX_INLINE = 20_000; // characters of a block beyond which it is plain text

const rendered = new WeakMap(); // element → the sources of its blocks

function make(tag, ...children) {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
}

/** Bold, italic, code and links of one block. */
function inline(text, depth = 0) {
  if (text.length > MAX_INLINE || depth > 3) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold, italic, label, url] = match;
    nodes.push(text.slice(end, match.index));
    if (code !== undefined) nodes.push(make("code", code));
    else if (bold) nodes.push(make("strong", ...inline(bold, depth + 1)));
    else if (italic) nodes.push(make("em", ...inline(italic, depth + 1)));
    else nodes.push(Object.assign(make("a", label), { href: url, target: "_blank", rel: "noopener noreferrer" }));
    end = match.index + whole.length;
  }
  return [...nodes, text.slice(end)].filter((node) => node !== "");
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((one) => one.test(line));

/** Where the block that begins at a line ends, and what makes it an element. */
function blockAt(lines, start) {
  let end = start + 1;
  const more = (belongs) => { while (end < lines.length && belongs(lines[end])) end += 1; };
  const first = lines[start];
  const fence = first.match(FENCE);
  if (fence) {
    more((line) => !(line.trim().startsWith(fence[1]) && line.trim().replaceAll(fence[1][0], "") === ""));
    return [Math.min(end + 1, lines.length), () => code(lines.slice(start + 1, end).join("\n"), fence[2])];
  }
  const heading = first.match(HEADING);
  if (heading) return [end, () => make(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2]))];
  if (RULE.test(first)) return [end, () => make("hr")];
  if (QUOTE.test(first)) {
    more((line) => QUOTE.test(line));
    return [end, () => make("blockquote", ...inline(lines.slice(start, end).map((line) => line.replace(QUOTE, "")).join("\n")))];
  }
  if (ITEM.test(first)) {
    more((line) => ITEM.test(line) || /^ +\S/.test(line));
    return [end, () => list(lines.slice(start, end))];
  }
  if (first.includes("|") && DIVIDER.test(lines[end] ?? "")) {
    more((line) => line.includes("|"));
    return [end, () => table(lines.slice(start, end))];
  }
  more((line) => line.trim() && !startsBlock(line));
  return [end, () => make("p", ...inline(lines.slice(start, end).join("\n")))];
}

/** A list with those within it, by indentation. */
function list(lines) {
  const items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item) items.push({ indent: item[1].length, isOrdered: /\d/.test(item[2]), number: parseInt(item[2]), text: line.slice(item[0].length) });
    else items.at(-1).text += `\n${line.trim()}`;
  }
  const build = (start, indent) => {
    const element = make(items[start].isOrdered ? "ol" : "ul");
    if (items[start].isOrdered) element.start = items[start].number;
    let at = start;
    while (at < items.length && items[at].indent >= indent) {
      if (items[at].indent > indent + 1 && element.lastChild) {
        const [inner, next] = build(at, items[at].indent);
        element.lastChild.append(inner);
        at = next;
      } else {
        element.append(make("li", ...inline(items[at].text)));
        at += 1;
      }
    }
    return [element, at];
  };
  return build(0, Math.min(...items.map((one) => one.indent)))[0];
}

function table([head, , ...body]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (tag, line) => make("tr", ...cells(line).map((cell) => make(tag, ...inline(cell))));
  return make("div", make("table", make("thead", row("th", head)), make("tbody", ...body.map((line) => row("td", line)))));
}

/** Code with its language and a button that copies it. */
function code(text, language) {
  const button = Object.assign(make("button", "Copy"), { type: "button", className: "copy" });
  const pre = make("pre", text);
  button.addEventListener("click", async () => {
    const isCopied = await copy(pre);
    button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  const block = make("div", make("div", make("span", language), button), pre);
  block.className = "code";
  block.firstChild.className = "row minor";
  return block;
}

/** The clipboard is for secure contexts only; elsewhere the text is selected. */
async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}

/** Shows Markdown in an element; blocks that are the same as before are not touched. */
export function showMarkdown(element, text) {
  const lines = text.split("\n");
  const before = rendered.get(element) ?? [];
  const sources = [];
  for (let start = 0; start < lines.length;) {
    if (!lines[start].trim()) { start += 1; continue; }
    const [end, render] = blockAt(lines, start);
    const source = lines.slice(start, end).join("\n");
    const old = element.children[sources.length];
    if (before[sources.length] !== source) old ? old.replaceWith(render()) : element.append(render());
    sources.push(source);
    start = end;
  }
  while (element.children.length > sources.length) element.lastChild.remove();
  rendered.set(element, sources);
}
