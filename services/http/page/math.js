// LaTeX as a tree of MathML, as plain objects {tag, attributes, children}. This module needs no browser.
//
// It reads what models write. A command that it does not know is shown as its source.

import { ENVIRONMENTS, FUNCTIONS, LETTERS, LIMITS, NEGATED, SPACES, STYLES, SYMBOLS } from "./math_symbols.js";

const TOKEN = /\\(?:[a-zA-Z]+\*?|[^])|\s+|\d+(?:\.\d+)?|[^]/gu;
const MAX_SOURCE = 5000; // characters; a longer text is no formula
const MAX_NESTING = 50; // a formula that is deeper is shown as its source
const ACCENTS = new Map(Object.entries({
  hat: "^", widehat: "^", check: "ˇ", tilde: "~", widetilde: "~", bar: "¯", overline: "¯", vec: "→", overrightarrow: "→",
  overleftarrow: "←", dot: "˙", ddot: "¨", acute: "´", grave: "`", breve: "˘", mathring: "˚", overbrace: "⏞",
}));
const BELOW = new Map([["underline", "_"], ["underbrace", "⏟"]]);
const TEXTS = new Set(["text", "textrm", "textnormal", "mbox", "hbox", "textit", "textbf", "textsf", "texttt"]);
const NAMES = new Set(["mathrm", "operatorname", "operatorname*"]);
const FRACTIONS = new Set(["frac", "dfrac", "tfrac", "cfrac"]);
const PASSED_OVER = new Set([
  "displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "nonumber", "notag", "hline", "left.", "right.", "rm", "bf", "it",
]);
const SIZES = /^(?:[bB]igg?)[lrm]?$/;
const SHAPES = new Map([["-", "−"], ["*", "∗"], ["`", "‘"]]);
const PRIMES = ["", "′", "″", "‴", "⁗"];

class TooDeep extends Error {}

const node = (tag, children, attributes = {}) => ({ tag, attributes, children });
const text = (tag, value, attributes) => node(tag, [value], attributes);
const row = (items) => (items.length === 1 ? items[0] : node("mrow", items));
const space = (width) => node("mspace", [], { width });
const fence = (value) => text("mo", value, { stretchy: "true" });

/** Returns the MathML of a formula, or its source where it is no formula. */
export function formula(source, isBlock) {
  const attributes = isBlock ? { display: "block" } : {};
  if (source.length > MAX_SOURCE) return node("math", [text("mtext", source)], attributes);
  try {
    const parser = new Parser(source.trim().match(TOKEN) ?? [], isBlock);
    return node("math", [parser.rows(() => false)], attributes);
  } catch (error) {
    if (error instanceof TooDeep) return node("math", [text("mtext", source)], attributes);
    throw error;
  }
}

class Parser {
  constructor(tokens, isBlock) {
    this.tokens = tokens;
    this.isBlock = isBlock; // limits of sums stand above and below
    this.at = 0;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  take() {
    return this.tokens[this.at++];
  }

  skipSpace() {
    while (this.next !== undefined && /^\s/.test(this.next)) this.at += 1;
  }

  /** Whether the next token is this one, which is taken then. */
  takes(token) {
    this.skipSpace();
    if (this.next !== token) return false;
    this.at += 1;
    return true;
  }

  /** Reads rows of cells up to a token, which is not taken; one cell alone needs no table. */
  rows(isEnd, table = null) {
    const rows = [[[]]];
    while (this.next !== undefined && !isEnd(this.next)) {
      const token = this.next;
      if (token === "&") {
        this.at += 1;
        rows.at(-1).push([]);
      } else if (token === "\\\\" || token === "\\cr") {
        this.at += 1;
        if (this.tokens[this.at] === "[") this.bracket();
        rows.push([[]]);
      } else {
        rows.at(-1).at(-1).push(...this.item());
      }
    }
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].length && rows.length > 1) rows.pop();
    if (!table && rows.length === 1 && rows[0].length === 1) return row(rows[0][0]);
    const cells = rows.map((cell) => node("mtr", cell.map((items) => node("mtd", [row(items)]))));
    return node("mtable", cells, { class: table ?? "aligned" });
  }

  /** Reads items up to a token, which is not taken. */
  items(isEnd) {
    const found = [];
    while (this.next !== undefined && !isEnd(this.next)) found.push(...this.item());
    return found;
  }

  /** Reads what stands alone, with its scripts; nothing for white space. */
  item() {
    this.depth += 1;
    if (this.depth > MAX_NESTING) throw new TooDeep();
    const base = this.atom();
    const found = base ? [this.scripts(base)] : [];
    if (base?.needsSpace && ![undefined, "(", "[", "{", "}", "&", "\\left"].includes(this.next)) found.push(space("0.17em"));
    this.depth -= 1;
    return found;
  }

  /** Reads one argument: a group, or a single token. */
  argument() {
    this.skipSpace();
    if (this.next === undefined || this.next === "}" || this.next === "&") return node("mrow", []);
    this.depth += 1;
    if (this.depth > MAX_NESTING) throw new TooDeep();
    if (/^\d\d/.test(this.next)) this.tokens.splice(this.at, 1, ...this.next); // `\frac12`
    const found = this.atom() ?? node("mrow", []);
    this.depth -= 1;
    return found;
  }

  group() {
    const items = this.items((token) => token === "}");
    this.at += 1;
    return node("mrow", items);
  }

  /** Reads an argument as its source, without the braces around it. */
  raw() {
    if (!this.takes("{")) return this.take() ?? "";
    let source = "";
    for (let depth = 1; this.next !== undefined; source += this.take()) {
      depth += (this.next === "{") - (this.next === "}");
      if (depth === 0) break;
    }
    this.at += 1;
    return source;
  }

  /** Reads an optional argument in brackets as its source. */
  bracket() {
    if (!this.takes("[")) return null;
    const start = this.at;
    while (this.next !== undefined && this.next !== "]") this.at += 1;
    this.at += 1;
    return this.tokens.slice(start, this.at - 1).join("");
  }

  /** Returns an atom with what is written above and below it. */
  scripts(base) {
    const found = { above: [], below: [] };
    for (;;) {
      this.skipSpaceBefore("^", "_", "'", "\\limits", "\\nolimits");
      if (this.next === "'") {
        let count = 0;
        while (this.next === "'") { this.at += 1; count += 1; }
        found.above.push(text("mo", PRIMES[count] ?? "′".repeat(count)));
      } else if (this.next === "^" || this.next === "_") {
        const place = this.take() === "^" ? "above" : "below";
        found[place].push(this.argument());
      } else if (this.next === "\\limits" || this.next === "\\nolimits") {
        base.hasLimits = this.take() === "\\limits";
      } else break;
    }
    const [above, below] = [found.above, found.below].map((scripts) => (scripts.length ? row(scripts) : null));
    const isLimit = base.hasLimits ?? (base.isLarge && this.isBlock);
    if (above && below) return node(isLimit ? "munderover" : "msubsup", [base, below, above]);
    if (above) return node(isLimit ? "mover" : "msup", [base, above]);
    return below ? node(isLimit ? "munder" : "msub", [base, below]) : base;
  }

  skipSpaceBefore(...tokens) {
    if (/^\s/.test(this.next ?? "") && tokens.includes(this.tokens[this.at + 1])) this.at += 1;
  }

  /** Reads an atom; null where nothing is shown. */
  atom() {
    const token = this.take();
    if (/^\s/.test(token)) return null;
    if (token === "{") return this.group();
    if (token === "^" || token === "_" || token === "'") {
      this.at -= 1;
      return node("mrow", []); // scripts of nothing
    }
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (token === "~") return space("0.33em");
    if (/^\d/.test(token)) return text("mn", token);
    if (/^\p{L}/u.test(token)) return text(/^[\p{Script=Latin}\p{Script=Greek}]/u.test(token) ? "mi" : "mtext", token);
    if (token === "|") return text("mo", token, { stretchy: "false", lspace: "0", rspace: "0" });
    return text("mo", SHAPES.get(token) ?? token, "()[]".includes(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    const symbol = SYMBOLS.get(name);
    if (symbol) return symbol.isLetter ? text("mi", symbol.text) : Object.assign(text("mo", symbol.text), { isLarge: symbol.isLarge });
    if (SPACES.has(name)) return space(SPACES.get(name));
    if (FUNCTIONS.has(name)) return this.named(name, LIMITS.has(name));
    if (FRACTIONS.has(name)) return node("mfrac", [this.argument(), this.argument()]);
    if (TEXTS.has(name)) return text("mtext", this.raw().replace(/^ | $/g, "\u00a0").replace(/\\([%$#&_{} ])/g, "$1"));
    if (NAMES.has(name)) return this.named(this.raw().replace(/\\[,; ]/g, " ").replace(/[\\{}]/g, ""), name.endsWith("*"));
    if (STYLES.has(name)) return this.styled(STYLES.get(name));
    if (ACCENTS.has(name)) return this.accented("mover", ACCENTS.get(name), name === "overbrace");
    if (BELOW.has(name)) return this.accented("munder", BELOW.get(name), name === "underbrace");
    if (PASSED_OVER.has(name)) return null;
    if (SIZES.test(name)) return text("mo", this.delimiter(), { stretchy: "false" });
    return this.structure(name);
  }

  structure(name) {
    switch (name) {
      case "sqrt": return this.root();
      case "left": return this.fenced();
      case "right": case "end": return text("mtext", `\\${name}`, { class: "unknown" }); // without its beginning
      case "middle": return fence(this.delimiter());
      case "begin": return this.environment();
      case "boxed": case "fbox": return node("mrow", [this.argument()], { class: "boxed" });
      case "binom": case "dbinom": case "tbinom": return this.binomial();
      case "overset": case "stackrel": return this.stacked("mover");
      case "underset": return this.stacked("munder");
      case "not": return this.negated();
      case "pmod": return node("mrow", [space("0.5em"), text("mo", "("), text("mi", "mod"), space("0.33em"), this.argument(), text("mo", ")")]);
      case "tag": return node("mrow", [space("2em"), text("mtext", `(${this.raw()})`)]);
      case "label": this.raw(); return null;
      case "color": this.raw(); return null;
      case "textcolor": this.raw(); return this.argument();
      case "cancel": case "phantom": case "mathstrut": case "mathop": case "mathbin": case "mathrel": return this.argument();
      default: return text("mtext", `\\${name}`, { class: "unknown" });
    }
  }

  named(name, isLarge) {
    return Object.assign(text("mi", name, { mathvariant: "normal" }), { isLarge, needsSpace: true });
  }

  root() {
    const index = this.bracket();
    const inside = this.argument();
    if (index === null) return node("msqrt", [inside]);
    const parser = new Parser(index.match(TOKEN) ?? [], false);
    parser.depth = this.depth;
    return node("mroot", [inside, row(parser.items(() => false))]);
  }

  /** Reads letters in a style for which Unicode has letters of its own; others stay. */
  styled(style) {
    const change = (part) => {
      if (typeof part !== "string") return { ...part, children: part.children.map(change) };
      return [...part].map((letter) => LETTERS(style, letter)).join("");
    };
    return change(this.argument());
  }

  accented(tag, mark, isLarge) {
    const found = node(tag, [this.argument(), text("mo", mark, { stretchy: "true" })], { [tag === "mover" ? "accent" : "accentunder"]: "true" });
    return Object.assign(found, isLarge ? { hasLimits: true } : {});
  }

  stacked(tag) {
    const script = this.argument();
    return node(tag, [this.argument(), script]);
  }

  binomial() {
    const inside = node("mfrac", [this.argument(), this.argument()], { linethickness: "0" });
    return node("mrow", [fence("("), inside, fence(")")]);
  }

  negated() {
    const base = this.argument();
    const [shown] = base.children;
    return typeof shown === "string" ? text("mo", NEGATED.get(shown) ?? `${shown}\u0338`) : base;
  }

  /** Reads a delimiter; "." is an invisible one. */
  delimiter() {
    this.skipSpace();
    const token = this.take() ?? "";
    if (token === ".") return "";
    return token.startsWith("\\") ? (SYMBOLS.get(token.slice(1))?.text ?? token) : token;
  }

  fenced() {
    const open = this.delimiter();
    const inside = this.rows((token) => token === "\\right" || token === "}");
    const close = this.takes("\\right") ? this.delimiter() : "";
    return node("mrow", [fence(open), inside, fence(close)]);
  }

  environment() {
    const name = this.raw();
    const known = ENVIRONMENTS.get(name.replace("*", ""));
    if (name.startsWith("array")) this.raw(); // alignments
    if (!known) return text("mtext", `\\begin{${name}}`, { class: "unknown" });
    this.depth += 1;
    if (this.depth > MAX_NESTING) throw new TooDeep();
    const table = this.rows((token) => token === "\\end", known.className);
    this.depth -= 1;
    if (this.takes("\\end")) this.raw();
    const [open, close] = known.fences;
    return open || close ? node("mrow", [fence(open), table, fence(close)]) : table;
  }
}
