"""Calls and text are the same however the answer is cut into pieces."""

import contextlib
import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.http.generation.tool_calls import Piece, make_parser
from penstock.services.http.shared.app_state import format_of
from tests.search import scaled
from tests.services.http.generation.tool_call_texts import FORMATS, SCHEMA, Texts

WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1,  2]}}\n</tool_call>'
)
WEATHER_ARGUMENTS = '{"city": "Köln", "days": [1,  2]}'
TIME = '<tool_call>{"arguments": {} , "name": "time"}</tool_call>'
BROKEN = '<tool_call>\n{"name": "weather", "arguments": ["city"]}\n</tool_call>'

JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3)


class Answer:
    """Message that a client assembles from the pieces, as OpenAI's client does."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.text = ""
        self.calls: list[tuple[str | None, str]] = []
        for piece in pieces:
            if isinstance(piece, str):
                assert piece
                self.text += piece
            elif piece.function.name is not None:
                assert piece.id is not None
                assert piece.index == len(self.calls)
                self.calls.append((piece.function.name, piece.function.arguments))
            else:
                name, arguments = self.calls[piece.index]
                self.calls[piece.index] = (name, arguments + piece.function.arguments)


def parsed_as(
    form: Any, pieces: list[str], is_forced: bool = False, is_cut: bool = False
) -> tuple[str, list[tuple[str | None, str]]]:
    """Return the text and the calls of an answer that comes in pieces."""
    parser = make_parser(form, {"f": SCHEMA}, is_forced)
    found = [piece for text in pieces for piece in parser.feed(text)]
    answer = Answer(found + parser.finish(is_cut))
    return answer.text, answer.calls


def parsed(
    answer: str, form: str = "hermes", is_cut: bool = False
) -> tuple[str, list[tuple[str | None, str]]]:
    """Return the text and the calls of an answer, which must be the same letter by letter."""
    whole = parsed_as(form, [answer], is_cut=is_cut)
    assert parsed_as(form, list(answer), is_cut=is_cut) == whole
    return whole


def cut(text: str, cuts: set[int]) -> list[str]:
    ends = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize(
    ("answer", "text", "names"),
    [
        (WEATHER, "", ["weather"]),
        (f"\n\n{WEATHER}\n{TIME}\n", "", ["weather", "time"]),
        (f"I look.\n\n{WEATHER}\n\nThen\n\n{TIME}", "I look.Then", ["weather", "time"]),
        (f"{BROKEN}\n{TIME}", BROKEN, ["time"]),
        (f"{TIME}\n{BROKEN}\n", f"{BROKEN}\n", ["time"]),
        (f"a\n{BROKEN}\n", f"a\n{BROKEN}\n", []),
        ("a\n<tool_call>\n{", "a\n<tool_call>\n{", []),
        ("3 < 4\n\n", "3 < 4\n\n", []),
        ("a\n<tool_c", "a\n<tool_c", []),
        ("</tool_call>", "</tool_call>", []),
    ],
)
def test_parses(answer: str, text: str, names: list[str]) -> None:
    found, calls = parsed(answer)
    assert (found, [name for name, _ in calls]) == (text, names)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "text",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "so"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": "{"}',
        '[{"name": "f", "arguments": 1}]',
        '[1, {"name": "f", "arguments": {}}]',
        '{"name": "f", "args": {"a": 1}}',
        '{"name": "f", "arguments" {}}',
    ],
)
def test_what_is_no_call_is_text(body: str) -> None:
    answer = f"<tool_call>{body}</tool_call>"
    assert parsed(answer) == (answer, [])


@pytest.mark.parametrize(
    ("body", "arguments", "text"),
    [
        ('{"name": "f", "arguments": {}} {}', "{}", "{}"),
        ('{"name": "f", "arguments": {"a": NaN}}', '{"a": NaN}', ""),
        ('{"name": "f", "arguments": {"a": 1}, "id": 7}', '{"a": 1}', ""),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}', ""),
        ('{"name": "f", "arguments": {"a": [1}]}}\n', '{"a": [1}]}}', ""),
        ('{"name": "f", "arguments": {"a": "x}}\n', '{"a": "x}}', ""),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}', ""),
    ],
)
def test_a_call_that_has_begun_is_a_call(body: str, arguments: str, text: str) -> None:
    """The arguments are sent as they are written. Other text within the tags is content."""
    assert parsed(f"<tool_call>{body}</tool_call>") == (text, [("f", arguments)])


@pytest.mark.parametrize(
    ("body", "calls", "text"),
    [
        # line breaks in strings
        ('{"name": "f", "arguments": {"a": "x\n\ty"}}', [("f", '{"a": "x\\n\\ty"}')], ""),
        ('{"arguments": {"a": "x\ny"}, "name": "f"}', [("f", '{"a": "x\\ny"}')], ""),
        ('{"name": "f", "arguments": {"a": "x\\\ny"}}', [("f", '{"a": "x\\ny"}')], ""),
        ('{"name": "f", "arguments": {"a":\n"\n}}"\n}}\n', [("f", '{"a":\n"\\n}}"\n}')], ""),
        # no arguments, and arguments as text
        ('{"name": "f", "arguments": null}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": ""}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": "{}"}', [("f", "{}")], ""),
        (
            '{"name": "f", "arguments": "{\\"a\\": \\"x\\ny\\"}"}',
            [("f", '{"a": "x\\ny"}')],
            "",
        ),
        # several calls
        (
            '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": "\n"}}',
            [("f", "{}"), ("g", '{"a": "\\n"}')],
            "",
        ),
        (
            '\n[{"name": "f", "arguments": {}}, {"arguments": null, "name": "g"}]\n',
            [("f", "{}"), ("g", "{}")],
            "",
        ),
        ('[{"name": "f"}]', [("f", "{}")], ""),
        ('{"name": "f"}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": {}}, {"a": 1}', [("f", "{}")], ', {"a": 1}'),
        ('{"name": "f", "arguments": {}, "id": 1} so', [("f", "{}")], "so"),
    ],
)
def test_calls_as_models_write_them(body: str, calls: list[Any], text: str) -> None:
    for end in ("</tool_call>", ""):
        assert parsed(f"<tool_call>{body}{end}") == (text, calls)


def test_arguments_are_sent_as_they_come() -> None:
    parser = make_parser("hermes", {})
    sent = [[p for p in parser.feed(one) if not isinstance(p, str)] for one in WEATHER]
    begin, end = WEATHER.index("{", 20), WEATHER.rindex("}}") + 1
    assert [bool(pieces) for pieces in sent] == [
        begin <= number < end for number in range(len(WEATHER))
    ]
    assert sent[begin][0].function.name == "weather"


def test_each_call_has_its_id() -> None:
    pieces = make_parser("hermes", {}).feed(WEATHER + TIME)
    ids = [piece.id for piece in pieces if not isinstance(piece, str) and piece.id]
    assert len(set(ids)) == len(ids) == 2


@given(
    answer=st.lists(
        st.sampled_from(
            [WEATHER, TIME, BROKEN, "<tool_call>", "</tool_call>", "<", "<tool", "\n", "a"]
        )
    ).map("".join),
    cuts=st.sets(st.integers(1, 200)),
)
def test_pieces_do_not_matter(answer: str, cuts: set[int]) -> None:
    assert parsed_as("hermes", cut(answer, cuts)) == parsed_as("hermes", [answer])


@given(arguments=ARGUMENTS, ascii_only=st.booleans(), cuts=st.sets(st.integers(1, 200)))
def test_any_arguments_come_through(
    arguments: dict[str, Any], ascii_only: bool, cuts: set[int]
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=1)
    body = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    assert parsed_as("hermes", cut(body, cuts))[1] == [("f", written)]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("length", range(1, len(WEATHER)))
def test_a_call_that_is_cut_off_is_a_call(length: int, is_forced: bool) -> None:
    """As soon as its name is there; before that it is text, or, in a forced call, nothing."""
    written = WEATHER[:length]
    found = parsed_as("hermes", [written], is_forced, is_cut=True)
    if 'weather"' not in written:
        assert found == ("" if is_forced else written, [])
        return
    _, _, arguments = written.partition('"arguments": ')
    arguments = arguments.partition("}\n")[0]
    assert found == ("", [("weather", arguments.replace("]}}", "]}"))])


def test_text_before_a_call_that_is_cut_off_stays() -> None:
    text, calls = parsed(f"so\n{WEATHER}\n{WEATHER[:60]}", is_cut=True)
    assert text == "so"
    assert calls == [("weather", WEATHER_ARGUMENTS), ("weather", '{"city": "Köln"')]


def test_a_call_that_the_model_did_not_end() -> None:
    """Before its arguments begin it is text; then it is a call without a tag at its end."""
    assert parsed(WEATHER[:25]) == (WEATHER[:25], [])
    for end in (3, 12, 14, 15):
        text, ((name, _),) = parsed(WEATHER[:-end])
        assert (text, name) == ("", "weather")


@given(answer=st.lists(st.sampled_from(["<", "<tool", "_call", "\n", "a", " "])).map("".join))
def test_holds_back_only_newlines_and_half_a_tag(answer: str) -> None:
    parser = make_parser("hermes", {})
    for character in answer:
        parser.feed(character)
    assert "<tool_call>".startswith(Answer(parser.finish()).text.strip("\n"))


@pytest.mark.parametrize(
    ("form", "start", "blank"),
    [
        ("hermes", "", "\n"),
        ("hermes", "<tool_call>", " \n"),
        ("qwen3_coder", "<tool_call>", " "),
        ("qwen3_coder", "<tool_call><function=f>", "\n"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x", "\n"),
    ],
)
def test_a_long_run_of_white_space_is_examined_once(form: Any, start: str, blank: str) -> None:
    """A model may write it until its last token; nothing of it is lost."""
    parser, examined = make_parser(form, {}), 0

    def counted(examine: Any) -> Any:
        def call(*args: str) -> Any:
            nonlocal examined
            examined += len(parser._held)
            return examine(*args)

        return call

    pieces = parser.feed(start)
    parser._take_text = counted(parser._take_text)  # type: ignore[method-assign]
    if parser._reader:
        parser._reader.feed = counted(parser._reader.feed)  # type: ignore[method-assign]
    for _ in range(1000):
        pieces += parser.feed(blank)
    assert examined <= 5 * len(blank)
    pieces += parser.feed("b") + parser.finish()
    whole = make_parser(form, {})
    text = start + 1000 * blank + "b"
    assert vars(Answer(pieces)) == vars(Answer(whole.feed(text) + whole.finish()))


@pytest.mark.parametrize(
    ("form", "answer"),
    [("json", '{"\n \n\n \n'), ("hermes", '<tool_call>{a bx"</tool_call>{[\n \n')],
)
def test_white_space_at_the_end_of_an_answer_is_examined(form: Any, answer: str) -> None:
    """It may show that a text is no call, which matters if the answer is cut off there."""
    assert parsed_as(form, list(answer), True, True) == parsed_as(form, [answer], True, True)


NUM_TEXTS = scaled(500)


@pytest.mark.search
@pytest.mark.parametrize("form", FORMATS)
def test_pieces_of_each_format_do_not_matter(form: Any) -> None:
    texts = Texts(form, seed=1)
    for number in range(NUM_TEXTS):
        answer = texts.answer()
        options = (number % 5 == 0, number % 3 == 0)
        whole = parsed_as(form, [answer], *options)
        assert parsed_as(form, list(answer), *options) == whole, answer
        assert parsed_as(form, texts.cuts(answer), *options) == whole, answer


@pytest.mark.search
@pytest.mark.parametrize("form", FORMATS)
def test_calls_come_through(form: Any) -> None:
    texts = Texts(form, seed=2)
    for _ in range(NUM_TEXTS):
        calls = [texts.arguments() for _ in range(texts.random.randrange(1, 3))]
        answer = "\n".join(map(texts.call, calls))
        text, found = parsed_as(form, texts.cuts(answer))
        assert text == ""
        assert [(name, json.loads(one)) for name, one in found] == [("f", one) for one in calls]


@pytest.mark.search
@pytest.mark.parametrize("form", FORMATS)
def test_no_text_is_lost(form: Any) -> None:
    texts = Texts(form, seed=3)
    for number in range(NUM_TEXTS):
        answer = texts.answer()
        at = texts.random.randrange(len(answer) + 1)
        answer = f"{answer[:at]}Ω{answer[at:]}"
        is_cut = number % 2 == 0
        text, calls = parsed_as(form, texts.cuts(answer), is_cut=is_cut)
        found = text + "".join(name + arguments for name, arguments in calls)
        assert "Ω" in found or is_dropped(answer, is_cut), answer


def is_dropped(answer: str, is_cut: bool) -> bool:
    """Return True if Ω is in a further member of a call in JSON, or in a tag that is cut off."""
    for at in (at for at, character in enumerate(answer) if character == "{"):
        with contextlib.suppress(ValueError, StopIteration):
            members, _ = json.JSONDecoder(object_pairs_hook=list).raw_decode(answer, at)
            for keys in (("name",), ("arguments", "parameters")):
                members.remove(next(one for one in members if one[0] in keys))
            if "Ω" in json.dumps(members, ensure_ascii=False):
                return True
    tag = re.search(r"<parameter=[^<>\n]*$", answer)
    return is_cut and tag is not None and "Ω" in tag[0]


def test_the_format_is_found_in_the_template() -> None:
    assert format_of("") == "hermes"
    assert format_of("{% if tools %}<tool_call>") == "hermes"
    assert format_of("{% if tools %}<tool_call>\n<function=…") == "qwen3_coder"
    assert format_of("{% for tool in tools %}{{ tool | tojson }}") == "json"


def xml(body: str) -> str:
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


LIST = {"text": "a", "list": [1]}


@pytest.mark.parametrize(
    ("answer", "arguments", "text"),
    [
        (xml(""), {}, ""),
        (xml(parameter("text", 'a\n"b"\n')), {"text": 'a\n"b"\n'}, ""),
        (xml(parameter("text", "5")), {"text": "5"}, ""),
        (xml(parameter("unknown", "5")), {"unknown": "5"}, ""),
        (xml(parameter("number", "5") + parameter("list", "[1]")), {"number": 5, "list": [1]}, ""),
        (xml(parameter("number", "five")), {"number": "five"}, ""),
        (xml(parameter("number", "true")), {"number": "true"}, ""),
        (xml(parameter("maybe", "null")), {"maybe": None}, ""),
        (xml(parameter("maybe", "5")), {"maybe": "5"}, ""),
        (xml(parameter("any", "None")), {"any": None}, ""),
        (xml("<parameter=text>\na\n<parameter=number>\n5\n"), {"text": "a", "number": 5}, ""),
        (xml(f"so {parameter('text', 'a')}"), {"text": "a"}, "so"),
        ("<function=f>\n</function> then", {}, " then"),
        (
            xml(parameter("text", "<a>\n <parameter name='b'>1</parameter>\n</a>")),
            {"text": "<a>\n <parameter name='b'>1</parameter>\n</a>"},
            "",
        ),
        (xml(parameter("text", "\n&lt;&amp;<é🙂>\n")), {"text": "\n&lt;&amp;<é🙂>\n"}, ""),
        (xml("<parameter=text>a</parameter>\n<parameter=list>[1]</parameter>"), LIST, ""),
        (xml("<parameter=text>a</parameter></parameter>"), {"text": "a"}, "</parameter>"),
        ("<tool_call>\n<function=f>\n<parameter=number>\n5\n</parameter>\n", {"number": 5}, ""),
        ("<tool_call>\n<function=f>\n<parameter=text>\na", {"text": "a"}, ""),
    ],
)
def test_xml(answer: str, arguments: dict[str, Any], text: str) -> None:
    found, ((name, written),) = parsed(answer, "qwen3_coder")
    assert (found, name, json.loads(written)) == (text, "f", arguments)


@pytest.mark.parametrize(
    "answer", ["<function=", "<function=f", "<tool_call>\nf", "<function=a\nb>"]
)
def test_xml_that_is_no_call_is_text(answer: str) -> None:
    assert parsed(answer, "qwen3_coder") == (answer, [])


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("<parameter=text>", '{"text": "'),
        ("<parameter=number>", '{"number": '),
        ("<parameter=text", ""),
        ("<parameter=text>\na", '{"text": "a'),
        ("<parameter=text>\na\n</param", '{"text": "a'),
        ("<parameter=text>\na\n</parameter>\n<para", '{"text": "a"'),
        ("<parameter=text>\na</parameter> b", '{"text": "a</parameter> b'),
        ("<parameter=number>\n12\n</parameter>", '{"number": 12'),
        (parameter("text", "a") + "</function>", '{"text": "a"}'),
    ],
)
def test_a_parameter_that_is_cut_off_has_begun_with_its_tag(cut: str, arguments: str) -> None:
    answer = f"<tool_call>\n<function=f>\n{cut}"
    assert parsed(answer, "qwen3_coder", is_cut=True) == ("", [("f", arguments)])


def test_strings_in_xml_are_sent_as_they_come() -> None:
    parser = make_parser("qwen3_coder", {"f": SCHEMA})
    parser.feed("<tool_call>\n<function=f>\n<parameter=text>\n")
    (piece,) = parser.feed("half a ")
    assert isinstance(piece, str) is False and piece.function.arguments == "half a "  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answer", "names", "text"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', ["f"], ""),
        ('[{"name": "f", "parameters": {}}, {"name": "g", "arguments": {}}]', ["f", "g"], ""),
        ('{"name": "f", "arguments": {}}; {"name": "g", "arguments": {}}\nso', ["f", "g"], "so"),
        ('{"answer": {"name": 1}}', [], '{"answer": {"name": 1}}'),
        ("[1, 2]", [], "[1, 2]"),
        ('so {"name": "f", "arguments": {}}', [], 'so {"name": "f", "arguments": {}}'),
    ],
)
def test_calls_without_tags(answer: str, names: list[str], text: str) -> None:
    found, calls = parsed(answer, "json")
    assert (found, [name for name, _ in calls]) == (text, names)


def test_json_that_is_no_call_is_not_held() -> None:
    parser = make_parser("json", {})
    assert parser.feed(' {"an') == [' {"an']
