"""The three formats of tool calls: the same calls however an answer is cut into pieces."""

import contextlib
import json
import re
from typing import Any

import pytest

from penstock.services.http.generation.tool_calls import make_parser
from penstock.services.http.shared.app_state import format_of
from tests.search import scaled
from tests.services.http.generation.test_tool_calls import Answer
from tests.services.http.generation.tool_call_texts import FORMATS, SCHEMA, Texts

NUM_TEXTS = scaled(500)


@pytest.mark.search
@pytest.mark.parametrize("form", FORMATS)
def test_pieces_do_not_matter(form: Any) -> None:
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


def parsed_as(
    form: Any, pieces: list[str], is_forced: bool = False, is_cut: bool = False
) -> tuple[str, list[tuple[str | None, str]]]:
    parser = make_parser(form, {"f": SCHEMA}, is_forced)
    found = [piece for text in pieces for piece in parser.feed(text)]
    answer = Answer(found + parser.finish(is_cut))
    return answer.text, answer.calls


def xml(body: str) -> str:
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


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
        ("<tool_call>\n<function=f>\n<parameter=text>\na", {"text": "a"}, ""),
    ],
)
def test_xml(answer: str, arguments: dict[str, Any], text: str) -> None:
    for pieces in ([answer], list(answer)):
        found, calls = parsed_as("qwen3_coder", pieces)
        assert found == text
        assert [(name, json.loads(one)) for name, one in calls] == [("f", arguments)]


@pytest.mark.parametrize(
    "answer", ["<function=", "<function=f", "<tool_call>\nf", "<function=a\nb>"]
)
def test_xml_that_is_no_call_is_text(answer: str) -> None:
    assert parsed_as("qwen3_coder", list(answer)) == (answer, [])


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("<parameter=text>", '{"text": "'),
        ("<parameter=number>", '{"number": '),
        ("<parameter=text", ""),
        ("<parameter=text>\na", '{"text": "a'),
    ],
)
def test_a_parameter_that_is_cut_off_has_begun_with_its_tag(cut: str, arguments: str) -> None:
    answer = f"<tool_call>\n<function=f>\n{cut}"
    for pieces in ([answer], list(answer)):
        assert parsed_as("qwen3_coder", pieces, is_cut=True) == ("", [("f", arguments)])


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
    for pieces in ([answer], list(answer)):
        found, calls = parsed_as("json", pieces)
        assert (found, [name for name, _ in calls]) == (text, names)


def test_json_that_is_no_call_is_not_held() -> None:
    parser = make_parser("json", {})
    assert parser.feed(' {"an') == [' {"an']
