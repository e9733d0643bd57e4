// Colours in blocks of code: comments, strings, numbers and keywords, in linear time.

const words = (list) => new Set(list.split(" "));

const NUMBER = String.raw`(?<number>(?<![\w.])(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*)`;
const WORD = String.raw`(?<word>[A-Za-z_]\w*)`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const SLASHES = String.raw`(?<comment>\/\/[^\n]*|\/\*[^]*?(?:\*\/|$))`;
const HASH = String.raw`(?<comment>(?<![^\s;])#[^\n]*)`;
const DASHES = String.raw`(?<comment>--[^\n]*|\/\*[^]*?(?:\*\/|$))`;

const C_WORDS = `auto bool break case catch char class const constexpr continue default delete do double else enum extern false
 float for goto if inline int long namespace new nullptr private protected public return short signed sizeof static struct
 switch template this throw true try typedef typename union unsigned using virtual void volatile while NULL
 abstract boolean byte extends final finally implements import instanceof interface null package super synchronized throws
 var string foreach in is as async await override readonly get set val fun when object data sealed`.replace(/\s+/g, " ");
const JS_WORDS = `async await break case catch class const continue debugger default delete do else export extends false finally for
 from function if import in instanceof interface let new null of return static super switch this throw true try type typeof
 undefined var void while yield enum implements private public readonly as`.replace(/\s+/g, " ");
const FAMILIES = [
  {
    names: "python py python3",
    pattern: [HASH, String.raw`(?<string>[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${QUOTED}))`],
    keywords: words("and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return True try while with yield self"),
  },
  {
    names: "javascript js jsx typescript ts tsx mjs json jsonc",
    pattern: [SLASHES, String.raw`(?<string>${QUOTED}|${"`"}(?:[^${"`"}\\]|\\[^])*${"`"}?)`],
    keywords: words(JS_WORDS),
  },
  {
    names: "c cpp c++ cc h hpp java csharp cs c# kotlin kt scala swift dart cuda php",
    pattern: [SLASHES, `(?<string>${QUOTED})`],
    keywords: words(C_WORDS),
  },
  {
    names: "rust rs",
    pattern: [SLASHES, String.raw`(?<string>"(?:[^"\\]|\\[^])*"?|'(?:[^'\\\n]|\\[^])')`],
    keywords: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while"),
  },
  {
    names: "go golang",
    pattern: [SLASHES, String.raw`(?<string>${QUOTED}|${"`"}[^${"`"}]*${"`"}?)`],
    keywords: words("break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range return select struct switch true type var"),
  },
  {
    names: "bash sh shell zsh console dockerfile makefile yaml yml toml ini ruby rb perl r",
    pattern: [HASH, `(?<string>${QUOTED})`],
    keywords: words("if then else elif fi for in do done while until case esac function return export local true false null end def class module require begin rescue unless nil puts FROM RUN COPY CMD ENV"),
  },
  {
    names: "sql lua haskell hs",
    pattern: [DASHES, `(?<string>${QUOTED})`],
    keywords: words("select from where and or not null insert into values update set delete create table drop alter join left right inner outer on as group by order having limit distinct union case when then else end primary key foreign references index view function local return if elseif for while do in true false nil module import let"),
    isCaseless: true,
  },
  { names: "html xml svg", pattern: [String.raw`(?<comment><!--[^]*?(?:-->|$))`, String.raw`(?<string>"[^"]*"?)`], keywords: new Set() },
  { names: "css scss", pattern: [String.raw`(?<comment>\/\*[^]*?(?:\*\/|$))`, `(?<string>${QUOTED})`], keywords: words("important media import") },
].map((family) => ({ ...family, token: new RegExp([...family.pattern, NUMBER, WORD].join("|"), "g") }));
const BY_NAME = new Map(FAMILIES.flatMap((family) => family.names.split(" ").map((name) => [name, family])));

/** Returns code as texts and {tag: "span", kind, children}; all of it as one text in an unknown language. */
export function highlight(code, language) {
  const family = BY_NAME.get(language.split(/[\s{,:]/)[0].toLowerCase());
  if (!family) return [code];
  const nodes = [];
  let at = 0;
  for (const { 0: found, index, groups } of code.matchAll(family.token)) {
    const kind = groups.word ? isKeyword(family, found) && "keyword" : ["comment", "string", "number"].find((name) => groups[name] !== undefined);
    if (!kind) continue;
    if (index > at) nodes.push(code.slice(at, index));
    nodes.push({ tag: "span", kind, children: [found] });
    at = index + found.length;
  }
  if (at < code.length || !nodes.length) nodes.push(code.slice(at));
  return nodes;
}

const isKeyword = ({ keywords, isCaseless }, word) => keywords.has(isCaseless ? word.toLowerCase() : word);
