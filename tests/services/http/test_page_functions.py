"""Functions of the page that need no browser, run by Node.js: Markdown, formulas and metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.docs.pages import ROOT
from tests.search import diagonal

OF_CLIENTS = ROOT / "build" / "clients" / "bin" / "node"
NODE = shutil.which("node") or (OF_CLIENTS.exists() and str(OF_CLIENTS)) or ""
pytestmark = [
    pytest.mark.skipif(not NODE, reason="the page's functions are tested with Node.js"),
    pytest.mark.timeout(60),
]
Call = Callable[..., Any]
TABLE_TAGS = {"tbody", "td", "th", "thead", "tr"}
TAGS = {
    *("a", "blockquote", "code", "del", "em", "hr", "li", "ol", "p", "pre", "strong", "ul"),
    *("table", "h3", "h4", "h5", "h6", "span"),
    *TABLE_TAGS,
}
MATH_TAGS = {
    *("math", "mfrac", "mi", "mn", "mo", "mover", "mroot", "mrow", "mspace", "msqrt"),
    *("msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover"),
}
ATTRIBUTES = {
    *("accent", "accentunder", "class", "display", "linethickness", "lspace", "mathvariant"),
    *("rspace", "stretchy", "width"),
}
FRAGMENTS = (
    *("word ", "x", " ", "\n", "\n\n", "  ", "    ", "*", "**", "***", "_", "__", "~~", "`", "``"),
    *("```", "````python\n", "\n```\n", "~~~\n", "# ", "###", "---\n", "- ", "1. ", "23) ", "> "),
    *("| a | b |\n", "|---|:-:|\n", "|", "[", "](", ")", "![", "](https://a.b/c)", "\\", "\\*"),
    *(
        "$",
        "$$",
        "\n$$\n",
        "\\(",
        "\\)",
        "\\[",
        "\n\\]",
        "\\frac{1}",
        "x^2_i",
        "&",
        "\\\\",
        "{",
        "}",
    ),
    *("\\begin{cases}", "\\end{cases}", "\\left(", "\\sqrt[", "\\text{", "\\boxed", "5"),
    *("(javascript:alert(1))", "https://a.b/(c).", "<https://a.b>", "<b>", "[ ] ", "重点：", "é"),
)


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """`call("module.function", …)` returns what the page's function returns."""
    script = Path(__file__).with_name("page_functions.mjs")
    with subprocess.Popen(
        [NODE, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout

        def run(function: str, *args: object) -> Any:
            module, name = function.split(".")
            request = {"module": module, "name": name, "args": args}
            print(json.dumps(request), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())  # type: ignore[union-attr]

        yield run
        process.stdin.close()


def nodes_of(tree: list[Any]) -> Iterator[dict[str, Any]]:
    for node in tree:
        if isinstance(node, dict):
            yield node
            yield from nodes_of(node["children"])


def text_of(tree: list[Any]) -> str:
    return "".join(one if isinstance(one, str) else text_of(one["children"]) for one in tree)


def html_of(tree: list[Any]) -> str:
    """Nodes become elements without attributes other than the address of a link."""
    return "".join(
        node
        if isinstance(node, str)
        else f"<{node['tag']}{' ' + node['href'] if 'href' in node else ''}>"
        f"{html_of(node['children'])}</{node['tag']}>"
        for node in tree
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**a *b***", "<p><strong>a <em>b</em></strong></p>"),
        (
            "***a*** ~~b~~ 2*3*4 a_b_c",
            "<p><strong><em>a</em></strong> <del>b</del> 2*3*4 a_b_c</p>",
        ),
        ("**重点：**内容", "<p><strong>重点：</strong>内容</p>"),
        ("**a **b** c", "<p>**a <strong>b</strong> c</p>"),
        ("`` a ` b `` `c", "<p><code>a ` b</code> `c</p>"),
        (r"\*a\* \(x_1\)", "<p>*a* <math><msub><mi>x</mi><mn>1</mn></msub></math></p>"),
        ("- a\n  - b\n\n3. d", "<ul><li>a<ul><li>b</li></ul></li></ul><ol><li>d</li></ol>"),
        ("1. a\n   ```py\n   b\n\n    c\n   ```", "<ol><li><p>a</p><pre>b\n\n c</pre></li></ol>"),
        ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>"),
        (
            "a\n| b | c\\|d |\n|--|:-:|\n| `1` |",
            "<p>a</p><table><thead><tr><th>b</th><th>c|d</th></tr></thead>"
            "<tbody><tr><td><code>1</code></td></tr></tbody></table>",
        ),
        ("> a\n> - b\nlazy", "<blockquote><p>a</p><ul><li>b\nlazy</li></ul></blockquote>"),
        ("# a #\n---\n", "<h3>a</h3><hr></hr>"),
        ("````md\n```js\nx\n```\n````\ny", "<pre>```js\nx\n```</pre><p>y</p>"),
        ("```md\n```js\nx\n```\ny", "<pre>```js\nx</pre><p>y</p>"),
        ("```\nhalf *open*\n``", "<pre>half *open*\n``</pre>"),
        ("(https://a.b/c_(d)).", "<p>(<a https://a.b/c_(d)>https://a.b/c_(d)</a>).</p>"),
        ("**https://e.f**", "<p><strong><a https://e.f>https://e.f</a></strong></p>"),
        ('[**a** b](https://c.d "e")', "<p><a https://c.d><strong>a</strong> b</a></p>"),
        ("![a](https://b.c/d.png)", "<p><a https://b.c/d.png>a</a></p>"),
        (
            "[a [b](https://c.d)](https://e.f)",
            "<p>[a <a https://c.d>b</a>](<a https://e.f>https://e.f</a>)</p>",
        ),
    ],
)
def test_markdown(call: Call, text: str, expected: str) -> None:
    assert html_of(call("markdown.parse", text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg/onload=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\nscript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "[a](vbscript:x)",
        "[a](//evil.example)",
        "![a](x onerror=alert(1))",
        "<javascript:alert(1)>",
        "[a](\x01javascript:alert(1))",
        "| <b onclick=x> |\n|---|\n| <script> |",
    ],
)
def test_hostile_text_stays_text(call: Call, text: str) -> None:
    """Nothing but text nodes and known tags; no address that isn't the web's or mail."""
    tree = call("markdown.parse", text)
    assert {node["tag"] for node in nodes_of(tree)} <= {"p", "table", *TABLE_TAGS}
    for shown in re.findall(r"\w+", text):
        assert shown in text_of(tree)


def test_only_addresses_of_the_web_and_of_mail_are_links(call: Call) -> None:
    tree = call("markdown.parse", '[a](https://b.c/"onclick="d) [e](mailto:f@g.h) <https://i.j"k>')
    hrefs = [node["href"] for node in nodes_of(tree) if "href" in node]
    assert hrefs == ['https://b.c/"onclick="d', "mailto:f@g.h", "https://i.j"]


texts = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)


def source_of(tree: list[Any]) -> str:
    """Return text in which formulas are their source, between ⟦ and ⟧."""
    parts = []
    for node in tree:
        if isinstance(node, str):
            parts.append(node)
        elif node["tag"] == "math":
            parts.append(f"⟦{'block ' * node['isBlock']}{node['source'].strip()}⟧")
        else:
            parts.append(source_of(node["children"]) + "\n" * (node["tag"] in {"p", "li"}))
    return "".join(parts)


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5 and $10.",
        "$5-$10, US$5 or US$6, $3.50 and $0.20",
        "$5 million or 10$ each",
        "between $100 and $200 (or $300)",
        "$1,000 and $2,000",
        "$HOME/$USER, $PATH and $HOME",
        "a $ b $ c",
        "$x\n$ y",
        "$$$$ and \\(\\)",
        "$$ has no end",
        r"\[ nor has this",
    ],
)
def test_dollars_that_begin_no_formula(call: Call, text: str) -> None:
    assert source_of(call("markdown.parse", text)) == f"{text}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the $n$th of $x_1$, $y$s", "the ⟦n⟧th of ⟦x_1⟧, ⟦y⟧s\n"),
        ("函数$f(x)$的值", "函数⟦f(x)⟧的值\n"),
        (r"\$5 and $\$5$", r"$5 and ⟦\$5⟧" "\n"),
        (r"$\text{if it is}$", r"⟦\text{if it is}⟧" "\n"),
        ("`$a$` **$b$**", "$a$ ⟦b⟧\n"),
        ("is\n$$\na = b\n- c\n# d\n$$\nthen", "is\n⟦block a = b\n- c\n# d⟧\nthen\n"),
        (r"\[a\] and \(b\)", "⟦block a⟧ and ⟦b⟧\n"),
        ("- a\n  $$\n  b\n  $$\n- c", "a\n⟦block b⟧\n\nc\n"),
        ("$$ a\n\nb $$", "$$ a\nb $$\n"),
    ],
)
def test_where_formulas_are(call: Call, text: str, expected: str) -> None:
    assert source_of(call("markdown.parse", text)) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        ("x'^2_i", "<msubsup><mi>x</mi><mi>i</mi><mrow><mo>′</mo><mn>2</mn></mrow></msubsup>"),
        (r"\sum_i^n", "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover>"),
        (r"\int_0^1", "<msubsup><mo>∫</mo><mn>0</mn><mn>1</mn></msubsup>"),
        (r"\lim_a", "<munder><mi>lim</mi><mi>a</mi></munder>"),
        (r"\sqrt[3]\alpha", "<mroot><mi>α</mi><mn>3</mn></mroot>"),
        (r"a \le b \ne \infty", "<mrow><mi>a</mi><mo>≤</mo><mi>b</mi><mo>≠</mo><mi>∞</mi></mrow>"),
        (r"\mathbb R\mathbf{x1}", "<mrow><mi>ℝ</mi><mrow><mi>𝐱</mi><mn>𝟏</mn></mrow></mrow>"),
        (r"\left( a \right.", "<mrow><mo>(</mo><mi>a</mi><mo></mo></mrow>"),
        (r"\text{if } \operatorname{rank}", "<mrow><mtext>if\u00a0</mtext><mi>rank</mi></mrow>"),
        (r"\boxed{42}", "<mrow><mrow><mn>42</mn></mrow></mrow>"),
        (r"\not= -1.5", "<mrow><mo>≠</mo><mo>−</mo><mn>1.5</mn></mrow>"),
        (
            r"\begin{pmatrix} a & b \\ c & d \\ \end{pmatrix}",
            "<mrow><mo>(</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr>"
            "<mtr><mtd><mi>c</mi></mtd><mtd><mi>d</mi></mtd></mtr></mtable><mo>)</mo></mrow>",
        ),
        (r"\foo{x}", r"<mrow><mtext>\foo</mtext><mrow><mi>x</mi></mrow></mrow>"),
        (r"\constructor", r"<mtext>\constructor</mtext>"),
        (r"\begin{toString}", r"<mtext>\begin{toString}</mtext>"),
        ("<b>", "<mrow><mo><</mo><mi>b</mi><mo>></mo></mrow>"),
        ("}", "<mo>}</mo>"),
    ],
)
def test_formulas(call: Call, source: str, expected: str) -> None:
    assert html_of([call("math.formula", source, True)]) == f"<math>{expected}</math>"


def test_sums_within_a_line_have_their_limits_beside_them(call: Call) -> None:
    shown = html_of([call("math.formula", r"\sum_i", False)])
    assert shown == "<math><msub><mo>∑</mo><mi>i</mi></msub></math>"


@pytest.mark.parametrize(
    "piece",
    ["{", "x^", r"\frac", r"\sqrt[", r"\left(", r"\begin{matrix}", "&", r"\\", r"\hat", "^{", "'"],
)
def test_a_formula_that_is_a_bomb_is_shallow(call: Call, piece: str) -> None:
    """A formula that is too deep or too long is text; a browser would overflow its stack."""
    for number in (10_000, 4000 // len(piece)):
        tree = [call("math.formula", piece * number, True)]
        for _ in range(400):
            tree = [node for parent in tree for node in parent["children"] if node != str(node)]
        assert tree == []


@pytest.mark.parametrize(
    ("language", "code", "expected"),
    [
        ("python", 'def f(): # a "b"', '[def] f(): {# a "b"}'),
        ("py", "x1 = '#' if 0x1F else 2.5", "x1 = <'#'> [if] (0x1F) [else] (2.5)"),
        ("py", '"""a\n# b', '<"""a\n# b>'),
        ("js", "const a = `b\n// c` // d", "[const] a = <`b\n// c`> {// d}"),
        ("SQL", "SELECT a -- b", "[SELECT] a {-- b}"),
        ("sh", "curl a/#b # c", "curl a/#b {# c}"),
        ("c", "/* a\nb", "{/* a\nb}"),
        ("unknown", "def 'a' 1", "def 'a' 1"),
        ("", "def 'a' 1", "def 'a' 1"),
    ],
)
def test_colours_of_code(call: Call, language: str, code: str, expected: str) -> None:
    (block,) = call("markdown.parse", f"```{language}\n{code}\n```")
    marks = {"comment": "{}", "string": "<>", "number": "()", "keyword": "[]"}
    shown = [
        node if isinstance(node, str) else node["children"][0].join(marks[node["kind"]])
        for node in block["children"]
    ]
    assert "".join(shown) == expected
    assert text_of([block]) == code


@settings(max_examples=300)
@given(text=texts, size=st.integers(1, 5))
def test_any_text(call: Call, text: str, size: int) -> None:
    """Known tags, safe links, no lost words, and the same in whatever pieces it is received."""
    tree = call("markdown.parse", text)
    for node in nodes_of(tree):
        assert node["tag"] in TAGS | MATH_TAGS
        assert set(node.get("attributes", ())) <= ATTRIBUTES
        assert re.match(r"(https?://|mailto:)", node.get("href", "https://"))
        assert node["tag"] != "a" or not any(
            one["tag"] == "a" for one in nodes_of(node["children"])
        )
    shown = text_of(tree) + "".join(node.get("language", "") for node in nodes_of(tree))
    for word in ("word", "重点", "é"):
        assert shown.count(word) == text.count(word)
    assert call("test.firstDifference", text, size) is None


STARTS = ("", "# ", "http://x", "```\n", "- ", "|-")
PIECES = (
    *("`", "` `` ``` ", "*", "**a ", "*a **b ", "***a* b** ", "_a ", "~~a ", "[", "![", "**["),
    *("[a](http://", '[a](http://x "', "](http://x", "http://x..", "http://x)", "http://("),
    *(
        ")",
        "> ",
        "- ",
        "  - a\n",
        "> - ",
        "-\n",
        "- \n\n",
        "1. a\n",
        "|",
        "|-",
        "a|b\n|-|\n",
        "# #",
    ),
    *(
        "$",
        "$$",
        "$$\n",
        "\\[\n",
        "\\(",
        "\\)",
        "$a",
        "\\$",
        "```py\n'",
        "```js\n/*",
        "$aaaa",
        "$a b",
    ),
    *("```\n", "~~~", "\\", "h", " ", "\n", "a\n\n", "a ", "| "),
)


@pytest.mark.parametrize(("piece", "start"), diagonal(PIECES, STARTS))
def test_long_texts_take_linear_time(call: Call, piece: str, start: str) -> None:
    """A quadratic step for 100,000 characters would exceed the test's time limit."""
    text = (start + piece * 100_000)[:100_000]
    for end in ("", "x"):
        assert call("test.parseAndCount", text + end) >= 0


def test_samples(call: Call) -> None:
    """The expected text is from the client library of Prometheus."""
    registry = CollectorRegistry()
    odd = 'a"b\\c\nd},e="f'
    Gauge("penstock:one", "A text.", ["x", "y"], registry=registry).labels(odd, "z").set(1.5e-7)
    Gauge("penstock:two", "A text.", registry=registry).set(float("-inf"))
    samples = dict(call("metrics.parseMetrics", generate_latest(registry).decode()))
    assert samples["penstock:one"] == [{"labels": {"x": odd, "y": "z"}, "value": 1.5e-7}]
    assert samples["penstock:two"] == [{"labels": {}, "value": "-Infinity"}]


def scrape(change: Callable[[Any], None]) -> tuple[str, str]:
    """Return the metrics before and after a change."""
    registry = CollectorRegistry()
    metrics = {
        "tokens": Counter("penstock:generation_tokens", "", ["model_name"], registry=registry),
        "ttft": Histogram(
            "penstock:time_to_first_token_seconds",
            "",
            ["model_name"],
            buckets=(0.1, 0.2, 0.4),
            registry=registry,
        ),
        "kv": Gauge("penstock:kv_cache_usage_perc", "", ["replica"], registry=registry),
        "running": Gauge("penstock:num_requests_running", "", ["replica"], registry=registry),
    }
    metrics["ttft"].labels("a").observe(0.05)
    metrics["tokens"].labels("a").inc(7)
    before = generate_latest(registry).decode()
    change(metrics)
    return before, generate_latest(registry).decode()


def test_quantiles_are_those_of_new_values(call: Call) -> None:
    def observe(metrics: Any) -> None:
        for value in (0.15, 0.15, 0.3):
            metrics["ttft"].labels("a").observe(value)
        metrics["ttft"].labels("b").observe(9)

    before, after = scrape(observe)
    name = "time_to_first_token_seconds"
    found = call("test.quantiles", before, after, name, [0.25, 0.5, 0.75, 1])
    assert found == pytest.approx([0.15, 0.2, 0.4, 0.4])  # what is above all bounds is the last
    assert call("test.quantiles", after, after, name, [0.5]) == [None]


def test_a_point_sums_models_and_replicas(call: Call) -> None:
    def grow(metrics: Any) -> None:
        metrics["tokens"].labels("a").inc(10)
        metrics["tokens"].labels("b").inc(20)
        for replica, (usage, running) in enumerate(((0.5, 3), (0.1, 4))):
            metrics["kv"].labels(replica).set(usage)
            metrics["running"].labels(replica).set(running)

    before, after = scrape(grow)
    point = call("test.point", before, after, 2)
    assert point["tokens"] == [15, 0]
    assert point["kv"] == [pytest.approx(0.3)]
    assert point["requests"] == [7, 0]
    assert point["ttft"] == [None, None]
    assert call("test.point", after, before, 2)["tokens"] == [None, 0]  # the gateway restarted


def test_ends_of_axes(call: Call) -> None:
    found = {value: call("metrics.roundUp", value) for value in (0, 0.03, 1, 3, 21, 600)}
    assert found == {0: 1, 0.03: pytest.approx(0.05), 1: 1, 3: 5, 21: 25, 600: 1000}
