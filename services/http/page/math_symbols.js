// Names of LaTeX, and the characters that they stand for.

const pairs = (list) => list.trim().split(/\s+/).map((pair) => pair.split(/:(?=.)/u));

const GREEK = `alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ
  lambda:λ mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ
  omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω
  hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ wp:℘ imath:ı jmath:ȷ infty:∞ emptyset:∅ varnothing:∅ partial:∂ nabla:∇ angle:∠
  triangle:△ degree:° top:⊤ bot:⊥ square:□ Box:□ blacksquare:■ checkmark:✓ dagger:† hslash:ℏ`;
const LARGE = `sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigvee:⋁ bigwedge:⋀ bigoplus:⨁ bigotimes:⨂`;
const OTHERS = `int:∫ iint:∬ iiint:∭ oint:∮ cdot:⋅ times:× div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖
  otimes:⊗ odot:⊙ cap:∩ cup:∪ uplus:⊎ wedge:∧ land:∧ vee:∨ lor:∨ setminus:∖ backslash:\\ neg:¬ lnot:¬ le:≤ leq:≤
  leqslant:≤ ge:≥ geq:≥ geqslant:≥ ll:≪ gg:≫ ne:≠ neq:≠ equiv:≡ sim:∼ simeq:≃ cong:≅ approx:≈ propto:∝ doteq:≐
  coloneqq:≔ triangleq:≜ prec:≺ succ:≻ preceq:⪯ succeq:⪰ subset:⊂ supset:⊃ subseteq:⊆ supseteq:⊇ subsetneq:⊊
  supsetneq:⊋ in:∈ notin:∉ ni:∋ forall:∀ exists:∃ nexists:∄ mid:∣ nmid:∤ parallel:∥ perp:⊥ models:⊨ vdash:⊢ dashv:⊣
  to:→ rightarrow:→ longrightarrow:⟶ leftarrow:← gets:← longleftarrow:⟵ leftrightarrow:↔ longleftrightarrow:⟷
  Rightarrow:⇒ Longrightarrow:⟹ implies:⟹ Leftarrow:⇐ impliedby:⟸ Leftrightarrow:⇔ Longleftrightarrow:⟺ iff:⟺
  mapsto:↦ longmapsto:⟼ uparrow:↑ downarrow:↓ updownarrow:↕ Uparrow:⇑ Downarrow:⇓ hookrightarrow:↪ hookleftarrow:↩
  nearrow:↗ searrow:↘ rightharpoonup:⇀ leftharpoonup:↼ rightleftharpoons:⇌ rightrightarrows:⇉ leadsto:⇝
  ldots:… dots:… cdots:⋯ dotsc:… dotsb:⋯ vdots:⋮ ddots:⋱ therefore:∴ because:∵ prime:′ colon:: lbrace:{ rbrace:}
  lbrack:[ rbrack:] langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ vert:| lvert:| rvert:| Vert:‖ lVert:‖
  rVert:‖ surd:√ diamond:⋄ bmod:mod lt:< gt:> asymp:≍ ltimes:⋉ rtimes:⋊ trianglelefteq:⊴ triangleleft:◁`;

/** name → {text, isLetter, isLarge} */
export const SYMBOLS = new Map([
  ...pairs(GREEK).map(([name, text]) => [name, { text, isLetter: true }]),
  ...pairs(LARGE).map(([name, text]) => [name, { text, isLarge: true }]),
  ...pairs(OTHERS).map(([name, text]) => [name, { text }]),
  ..."{}%$#&_".split("").map((text) => [text, { text }]),
  ["|", { text: "‖" }],
]);
export const FUNCTIONS = new Set(`sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log ln lg exp lim limsup
  liminf max min sup inf det gcd lcm arg deg dim hom ker Pr mod argmax argmin sgn tr`.split(/\s+/));
/** functions that have what belongs to them below, in a block */
export const LIMITS = new Set("lim limsup liminf max min sup inf det gcd Pr argmax argmin".split(" "));
export const SPACES = new Map(Object.entries({
  ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "0em", " ": "0.33em", "\n": "0.33em",
  quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em", space: "0.33em",
}));
export const NEGATED = new Map(Object.entries({ "=": "≠", "∈": "∉", "<": "≮", ">": "≯", "≤": "≰", "≥": "≱", "⊂": "⊄", "⊆": "⊈", "≡": "≢", "∼": "≁", "∣": "∤", "∃": "∄" }));

const plain = (className) => ({ fences: ["", ""], className });
/** environment without its star → what stands around it, and the class of its table */
export const ENVIRONMENTS = new Map(Object.entries({
  matrix: plain("matrix"), smallmatrix: plain("matrix"), array: plain("matrix"),
  pmatrix: { fences: ["(", ")"], className: "matrix" }, bmatrix: { fences: ["[", "]"], className: "matrix" },
  Bmatrix: { fences: ["{", "}"], className: "matrix" }, vmatrix: { fences: ["|", "|"], className: "matrix" },
  Vmatrix: { fences: ["‖", "‖"], className: "matrix" },
  cases: { fences: ["{", ""], className: "cases" }, rcases: { fences: ["", "}"], className: "cases" },
  aligned: plain("aligned"), align: plain("aligned"), split: plain("aligned"), alignat: plain("aligned"), eqnarray: plain("aligned"),
  gathered: plain("matrix"), gather: plain("matrix"), multline: plain("matrix"), equation: plain("matrix"),
}));

/** command → style */
export const STYLES = new Map(Object.entries({
  mathbb: "double", mathbf: "bold", boldsymbol: "bold", bm: "bold", mathcal: "script", mathscr: "script", mathfrak: "fraktur",
  mathsf: "sans", mathtt: "mono", mathit: "italic", mathnormal: "italic",
}));
const STARTS = { // code points of A, a and 0
  double: [0x1d538, 0x1d552, 0x1d7d8], bold: [0x1d400, 0x1d41a, 0x1d7ce], script: [0x1d49c, 0x1d4b6], fraktur: [0x1d504, 0x1d51e],
  sans: [0x1d5a0, 0x1d5ba, 0x1d7e2], mono: [0x1d670, 0x1d68a, 0x1d7f6],
};
const OLDER = { // letters that Unicode had before
  double: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
  script: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  fraktur: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
};

/** Returns a letter or digit in a style, as far as Unicode has it. */
export function LETTERS(style, letter) {
  if (OLDER[style]?.[letter]) return OLDER[style][letter];
  const kind = ["AZ", "az", "09"].findIndex(([first, last]) => letter >= first && letter <= last);
  const start = STARTS[style]?.[kind];
  return start && letter.length === 1 ? String.fromCodePoint(start + letter.charCodeAt(0) - "Aa0".charCodeAt(kind)) : letter;
}
