"""The reasoning and the answer are the same however the tokens come, and end at a token."""

import json
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.chat import Message
from penstock.protocol.messages.client import FinishReason, GenerateReply, TextDelta
from penstock.services.http.generation.chat import ChatChoice, ReasoningSplitter
from penstock.services.http.generation.schema import ChatRequest, Function, Tool
from penstock.services.http.messages import MessageEvents
from penstock.services.http.responses.routes import ResponseEvents, begun
from penstock.services.http.responses.schema import ResponsesRequest
from penstock.services.http.responses.to_chat_request import offer
from penstock.services.http.shared.app_state import TagIds, ToolFormat
from penstock.services.http.shared.errors import ENCODER
from tests.search import scaled
from tests.services.http.generation.reasoning_spans import (
    END_THINK,
    THINK,
    delta,
    deltas,
    reply,
    span,
    tagged,
    tokens,
)
from tests.services.http.generation.tool_call_texts import SCHEMA, Texts

PARTS = ["<think>", "</think>", "<", "</thi", "think>", "\n", "\n\n", " ", "a", "7 é"]
TEXTS = st.lists(st.sampled_from(PARTS)).map("".join)
TOKENS = st.lists(st.sampled_from([THINK, END_THINK, *PARTS])).map(lambda parts: tokens(*parts))


def split(pieces: list[TextDelta]) -> tuple[str, str]:
    splitter = ReasoningSplitter()
    parts = [splitter.feed(one.text, one.reasoning_begin, one.reasoning_end) for one in pieces]
    parts.append(splitter.finish())
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


def test_a_long_run_of_newlines_is_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    splitter, calls = ReasoningSplitter(), []
    examine = splitter._split
    monkeypatch.setattr(splitter, "_split", lambda **given: calls.append(given) or examine(**given))
    parts = [splitter.feed("a", 0, None)] + [splitter.feed("\n", 0, None) for _ in range(1000)]
    assert len(calls) <= 2
    assert parts[0] == ("a", "") and not any(map(any, parts[1:]))
    assert splitter.feed("b", 0, None) == (1000 * "\n" + "b", "")


def split_tokens(token_ids: list[int], **fields: Any) -> tuple[str, str]:
    """Return both parts, which must not depend on how the tokens come."""
    one_by_one = split(deltas([[token] for token in token_ids], **fields))
    assert split(deltas([token_ids], **fields)) == one_by_one
    return one_by_one


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\n1 and 2\n\nmake 3\n</think>\n\n3\n", "1 and 2\n\nmake 3", "3\n"),
        ("\n <think>a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\n3", "", "3"),
        ("<think>\nfar too lon", "far too lon", ""),
        ("<think>\na\n\n", "a", ""),
        ("<think>\na\n</thin", "a\n</thin", ""),
        ("<think>a</think>b</think>c<think>", "a", "b</think>c<think>"),
        ("\n\n3 < 4", "", "\n\n3 < 4"),
        ("<thin ice", "", "<thin ice"),
        ("<thin", "", "<thin"),
        ("3 <think>4</think>", "", "3 <think>4</think>"),
        ("", "", ""),
    ],
)
def test_splits(text: str, reasoning: str, content: str) -> None:
    assert split_tokens(tagged(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nhm\n</think>\n\n3", "hm", "3"),
        ("<think>\nhm\n</think>\n\n3", "hm", "3"),
        ("</think>\n\n3", "", "3"),
        ("hm", "hm", ""),
        ("\n<thi", "<thi", ""),
    ],
)
def test_prompt_begins_the_reasoning(text: str, reasoning: str, content: str) -> None:
    assert split_tokens(tagged(text), starts_reasoning=True) == (reasoning, content)


def test_a_spelled_tag_is_text() -> None:
    """Grammars begin after the token; so does the answer."""
    thought = "I close with </think>\n\nor not"
    token_ids = tokens(THINK, f"\n{thought}\n", END_THINK, "\n\n{}")
    assert split_tokens(token_ids) == (thought, "{}")
    assert split_tokens(tokens("<think>a</think>b")) == ("", "<think>a</think>b")
    assert split_tokens(tokens("a</think>", END_THINK, "b"), starts_reasoning=True) == (
        "a</think>",
        "b",
    )


@given(TOKENS, st.sets(st.integers(1, 60)), st.booleans(), st.sampled_from([[], ["\n"], ["a7"]]))
def test_batches_do_not_matter(
    token_ids: list[int], cuts: set[int], starts_thinking: bool, stop: list[str]
) -> None:
    ends = [0, *sorted(cuts), len(token_ids)]
    batches = [token_ids[start:end] for start, end in pairwise(ends)]
    fields = {"starts_reasoning": starts_thinking, "stop": stop}
    found = split(deltas(batches, **fields))
    assert found == split(deltas([[token] for token in token_ids], **fields))


@given(TEXTS, st.sets(st.integers(1, 60)), st.booleans())
def test_pieces_do_not_matter(text: str, cuts: set[int], starts_thinking: bool) -> None:
    """A piece may know where reasoning ends before the text gets there."""
    ends = [0, *sorted(cuts), len(text)]
    fields = span(text, starts_thinking)
    pieces = [delta(text[start:end], **fields) for start, end in pairwise(ends)]
    assert split(pieces) == split_tokens(tagged(text), starts_reasoning=starts_thinking)


@given(TOKENS, st.booleans())
def test_holds_back_only_white_space(token_ids: list[int], starts_thinking: bool) -> None:
    splitter = ReasoningSplitter()
    for one in deltas([[token] for token in token_ids], starts_reasoning=starts_thinking):
        splitter.feed(one.text, one.reasoning_begin, one.reasoning_end)
    assert not "".join(splitter.finish()).strip()


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n"
    "</function>\n</tool_call>",
}
Parts = tuple[str, str, list[tuple[str, str]], bool]
"""reasoning, text, calls with their arguments, whether the client is to answer calls"""


def request(**fields: Any) -> ChatRequest:
    tools = [Tool(type="function", function=Function(name="f", parameters=SCHEMA))]
    return ChatRequest(messages=[Message(role="user")], tools=tools, max_tokens=99, **fields)


def reply_of(pieces: list[TextDelta], finish: FinishReason) -> GenerateReply:
    text, last = "".join(one.text for one in pieces), pieces[-1]
    token_ids = [token for one in pieces for token in one.token_ids]
    ends = {"reasoning_begin": last.reasoning_begin, "reasoning_end": last.reasoning_end}
    return reply(text, finish, token_ids=token_ids, **ends)


def chat_parts(form: Any, asked: ChatRequest, pieces: list[TextDelta], end: GenerateReply) -> Parts:
    """Return what a client adds up; without pieces, the whole answer."""
    choice = ChatChoice(0, asked, ToolFormat(form))
    if not pieces:
        whole = msgspec.to_builtins(choice.whole(end))
        message = whole["message"]
        calls = [one["function"] for one in message.get("tool_calls", [])]
        reasoning, text = message.get("reasoning") or "", message["content"] or ""
        found = [(one["name"], one["arguments"]) for one in calls]
        return reasoning, text, found, whole["finish_reason"] == "tool_calls"
    chunks = [one for new in pieces for one in choice.chunks(new, None)]
    chunks += choice.chunks(None, end)
    reasoning = text = ""
    calls = []
    for chunk in map(msgspec.to_builtins, chunks):
        reasoning += chunk["delta"].get("reasoning") or ""
        text += chunk["delta"].get("content") or ""
        for call in chunk["delta"].get("tool_calls") or []:
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = name, arguments + call["function"]["arguments"]
    return reasoning, text, calls, chunks[-1].finish_reason == "tool_calls"


def message_parts(
    form: Any, asked: ChatRequest, pieces: list[TextDelta], end: GenerateReply
) -> Parts:
    events = MessageEvents("msg-1", "demo", asked, ToolFormat(form))
    if pieces:
        for new in pieces:
            list(events.events(new, None))
        list(events.events(None, end))
        message = msgspec.to_builtins(events.reply)
    else:
        message = msgspec.to_builtins(events.whole(end))
    parts = {"thinking": "", "text": ""}
    calls = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
        else:
            parts[block["type"]] += block[block["type"]]
    return parts["thinking"], parts["text"], calls, message["stop_reason"] == "tool_use"


def response_parts(
    form: Any, asked: ChatRequest, pieces: list[TextDelta], end: GenerateReply
) -> Parts:
    choice = ChatChoice(0, asked, ToolFormat(form))
    tools = offer([])
    response = begun(ResponsesRequest(input="hi", temperature=0.5, top_p=1.0), tools, "m")
    events = ResponseEvents(response, choice, tools.names, TagIds([END_THINK], []), lambda _: None)
    for new in pieces or [end]:
        list(events.events(new, None))
    list(events.events(None, end))
    parts = {"reasoning": "", "message": ""}
    calls = []
    for item in msgspec.json.decode(ENCODER.encode(response))["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        else:
            parts[item["type"]] += "".join(part["text"] for part in item["content"])
    is_called = response.status == "completed" and bool(calls)
    return parts["reasoning"], parts["message"], calls, is_called


APIS = {"chat": chat_parts, "messages": message_parts, "responses": response_parts}


def parts_of(
    form: Any,
    text: str,
    api: str = "chat",
    finish: FinishReason = "stop",
    cuts: list[str] | None = None,
    **fields: Any,
) -> Parts:
    """Return the parts of an answer, which must not depend on how it comes."""
    token_ids, asked, read = tagged(text), request(**fields), APIS[api]
    one_by_one = deltas([[token] for token in token_ids])
    end = reply_of(one_by_one, finish)
    whole = read(form, asked, [], end)
    assert read(form, asked, one_by_one, end) == whole, text
    ends = [0, *accumulate(len(one) for one in cuts or []), len(token_ids)]
    batches = [token_ids[start:stop] for start, stop in pairwise(ends)]
    assert read(form, asked, deltas(batches), end) == whole, text
    return whole


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("api", APIS)
def test_a_call_ends_the_reasoning(form: str, api: str) -> None:
    call = CALLS[form]
    arguments = '{"text": "a"}'
    called = [("f", arguments)]
    for text, expected in (
        (f"<think>\nI call.\n{call}", ("I call.", "", called, True)),
        (f"<think>\nI call.\n\n{call}\n{call}\n", ("I call.", "", called * 2, True)),
        (f"<think>\nI call.\n{call}\nThen I wait.", ("I call.", "Then I wait.", called, True)),
        (f"<think>{call}", ("", "", called, True)),
        (f"<think>\nI call.\n{call[:-13]}", ("I call.", "", called, True)),
    ):
        assert parts_of(form, text, api) == expected, text


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("api", APIS)
def test_a_call_that_is_mentioned_is_reasoning(form: str, api: str) -> None:
    call = CALLS[form]
    for thought in (f"I may call {call} or not.", f"I call.\n{call}", f"{call}\n{call}"):
        text = f"<think>\n{thought}\n</think>\n\n"
        assert parts_of(form, f"{text}No.", api) == (thought, "No.", [], False)
        called = [("f", '{"text": "a"}')]
        assert parts_of(form, f"{text}{call}", api) == (thought, "", called, True)
    thought = "<tool_call> is a tag, <tool_call>\n{} is none"
    assert parts_of(form, f"<think>\n{thought}", api) == (thought, "", [], False)


@pytest.mark.parametrize("form", CALLS)
def test_a_call_that_is_cut_off_has_what_was_generated(form: str) -> None:
    text = f"<think>\nI call.\n{CALLS[form].partition('</')[0].rstrip('}').rstrip()}"
    reasoning, content, calls, is_called = parts_of(form, text, finish="length")
    assert (reasoning, content, is_called) == ("I call.", "", False)
    ((name, arguments),) = calls
    assert name == "f"
    assert arguments.startswith('{"text": "a')


def test_reasoning_is_sent_as_it_comes() -> None:
    """Only what may be a call is held back."""
    choice = ChatChoice(0, request())
    sent = ""
    for new in deltas([[one] for one in tagged("<think>\n3 < 4, <tool_call> is a tag; ")]):
        sent += "".join(one.reasoning or "" for one in choice.deltas(new, None))
    assert sent == "3 < 4, <tool_call> is a tag; "


@pytest.mark.parametrize("choice", ["none", "required"])
def test_calls_that_cannot_be_there_are_reasoning(choice: Any) -> None:
    """A forced call follows the reasoning."""
    thought = f"I call.\n{CALLS['hermes']}"
    found = parts_of("hermes", f"<think>\n{thought}", tool_choice=choice)
    assert found == (thought, "", [], False)


def test_calls_without_tags_are_not_looked_for() -> None:
    thought = '{"name": "f", "arguments": {}}'
    assert parts_of("json", f"<think>\n{thought}") == (thought, "", [], False)


def test_only_one_call_where_calls_must_not_be_parallel() -> None:
    text = f"<think>{CALLS['hermes']}{CALLS['hermes']}"
    *_, calls, _ = parts_of("hermes", text, parallel_tool_calls=False)
    assert len(calls) == 1


@pytest.mark.search
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("api", APIS)
def test_pieces_of_calls_in_reasoning_do_not_matter(form: str, api: str) -> None:
    texts = Texts(form, seed=6)
    for number in range(scaled(150)):
        thought = texts.answer()
        end = texts.random.choice(["", "</think>", "\n</think>\n\n"])
        text = f"<think>\n{thought}{end}{texts.answer() if end else ''}"
        finish: FinishReason = "length" if number % 4 == 0 else "stop"
        parts_of(form, text, api, finish, texts.cuts(text))


@pytest.mark.search
@pytest.mark.parametrize("form", CALLS)
def test_no_reasoning_is_lost(form: str) -> None:
    """With `</think>`, reasoning is as written; without it, no letter is lost."""
    texts = Texts(form, seed=7)
    for _ in range(scaled(150)):
        thought = texts.answer()
        reasoning, *_ = parts_of(form, f"<think>{thought}</think>x")
        assert reasoning == thought.strip("\n")
