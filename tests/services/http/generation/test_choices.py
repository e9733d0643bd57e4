"""Answers in the shapes of chats and completions, whole and in pieces."""

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from penstock.protocol.messages.chat import Message
from penstock.protocol.messages.client import Logprob, TokenLogprobs
from penstock.services.http.generation.chat import ChatChoice
from penstock.services.http.generation.completions import CompletionChoice
from penstock.services.http.generation.generation import prompt_logprobs
from penstock.services.http.generation.schema import (
    ChatChoiceReply,
    ChatRequest,
    CompletionRequest,
    Function,
    StreamOptions,
    Tool,
)
from penstock.services.http.shared.errors import ENCODER
from tests.services.http.generation.reasoning_spans import delta, reply, span

COMPLETION = CompletionRequest(prompt="a")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def request(has_tools: bool = False, **fields: Any) -> ChatRequest:
    tools = [Tool(type="function", function=Function(name="f"))] if has_tools else []
    return ChatRequest(messages=[Message(role="user")], tools=tools, **fields)


def logprob(token: str, value: float = -1.0, *top: Logprob, rank: int = 1) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=ord(token),
        token=token,
        logprob=value,
        bytes=list(token.encode()),
        rank=rank,
        top=list(top),
    )


def streamed(text: str, asked: ChatRequest, size: int = 1) -> list[dict[str, Any]]:
    choice = ChatChoice(0, asked)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    chunks = [chunk for piece in pieces for chunk in choice.chunks(delta(piece, text), None)]
    chunks += choice.chunks(None, reply(text))
    return [msgspec.json.decode(ENCODER.encode(chunk)) for chunk in chunks]


def whole(text: str, asked: ChatRequest, *args: Any) -> ChatChoiceReply:
    return ChatChoice(0, asked).whole(reply(text, *args))


def joined(chunks: list[dict[str, Any]], field: str) -> str:
    return "".join(chunk["delta"].get(field, "") for chunk in chunks)


def test_the_reason_of_a_stop_is_reported_as_by_vllm() -> None:
    ended = reply("hello", stop_reason="!")
    for choice in (ChatChoice(0, request()), CompletionChoice(0, COMPLETION)):
        first, *_ = choice.chunks(delta("hello"), None)
        *_, last = choice.chunks(None, ended)
        assert "stop_reason" not in msgspec.json.decode(ENCODER.encode(first))
        assert last.stop_reason == "!"
    assert whole("hello", request()).stop_reason is None
    assert CompletionChoice(0, COMPLETION).whole(ended).stop_reason == "!"


def test_the_role_comes_first_and_the_reason_last() -> None:
    first, *middle, last = streamed("hello", request(), 2)
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert [chunk["delta"] for chunk in middle] == [{"content": t} for t in ("he", "ll", "o")]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_tool_calls() -> None:
    chunks = streamed(f"so\n{CALL}", request(has_tools=True), size=3)
    assert joined(chunks, "content") == "so"
    first, *others = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    function = {"name": "f", "arguments": ""}
    assert first.pop("id")
    assert first == {"index": 0, "type": "function", "function": function}
    arguments = "".join(call["function"]["arguments"] for call in others)
    assert msgspec.json.decode(arguments) == {"a": 1}
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_tool_calls_of_a_whole_answer() -> None:
    choice = whole(CALL, request(has_tools=True))
    encoded = msgspec.json.decode(ENCODER.encode(choice))
    assert encoded["finish_reason"] == "tool_calls"
    assert encoded["message"]["content"] is None
    (call,) = encoded["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_one_call_where_they_are_not_parallel() -> None:
    asked = request(has_tools=True, parallel_tool_calls=False)
    assert len(whole(f"{CALL}\n{CALL}", asked).message.tool_calls) == 1  # type: ignore[arg-type]
    both = whole(f"{CALL}\n{CALL}", request(has_tools=True)).message
    assert len(both.tool_calls) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [request(), request(has_tools=True, tool_choice="none")])
def test_without_tools_calls_are_text(asked: ChatRequest) -> None:
    assert whole(CALL, asked).message.content == CALL


def test_an_answer_cut_short_is_no_call() -> None:
    assert whole(CALL, request(has_tools=True), "length").finish_reason == "length"


def test_a_forced_call_that_is_cut_off() -> None:
    asked = request(has_tools=True, tool_choice="required")
    choice = ChatChoice(0, asked).whole(reply(CALL[:-15], "length"))
    (call,) = choice.message.tool_calls  # type: ignore[misc]
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1')
    assert (choice.finish_reason, choice.message.content) == ("length", None)


def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    text = "<think>\nhm\n</think>\n\nanswer"
    for asked, reasoning in ((request(), "hm"), (request(include_reasoning=False), "")):
        for name in ("reasoning", "reasoning_content"):
            assert joined(streamed(text, asked), name) == reasoning
        assert joined(streamed(text, asked), "content") == "answer"
        message = msgspec.json.decode(ENCODER.encode(whole(text, asked).message))
        thought = dict.fromkeys(("reasoning", "reasoning_content"), reasoning or None)
        nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
        assert message == {"role": "assistant", "content": "answer"} | thought | nulls


def test_token_ids() -> None:
    """The token ids of each piece of a stream come once, whatever its text is."""
    choice = ChatChoice(0, request(return_token_ids=True))
    role, *chunks = choice.chunks(delta("<think>\nhm\n</think>\n\nanswer"), None)
    assert [chunk.token_ids for chunk in (role, *chunks)] == [UNSET, [1], UNSET]
    assert choice.whole(reply("a")).token_ids == []
    asked = CompletionRequest(prompt="a", return_token_ids=True)
    completion = CompletionChoice(0, asked)
    completion.prompt_token_ids = [7, 8]
    pieces = [piece for _ in range(2) for piece in completion.chunks(delta("x"), None)]
    assert [piece.token_ids for piece in pieces] == [[1], [1]]
    assert [piece.prompt_token_ids for piece in pieces] == [[7, 8], UNSET]


# as Qwen3's tokenizer splits them
THOUGHT = ["<think>", "\n", "It", " is", " a city", ".", "\n", "</think>", "\n\n"]
WEATHER = ["<tool_call>", "\n", '{"', "name", '":', ' "', "get", "_weather", '",', ' "']
WEATHER += ["arguments", '":', ' {"', "city", '":', ' "', "Paris", '"}}\n', "</tool_call>"]


def says_nothing(chunk: dict[str, Any]) -> bool:
    texts = [text for text in chunk["delta"].values() if text]
    return not (texts or chunk["finish_reason"] or chunk["logprobs"] or chunk.get("token_ids"))


@pytest.mark.parametrize(("pieces", "number"), [(WEATHER, 9), (THOUGHT + WEATHER, 13)])
def test_no_chunk_says_nothing(pieces: list[str], number: int) -> None:
    """Tokens of a call's name, or half a character, have no chunk before they have text."""
    asked = request(has_tools=True)
    choice = ChatChoice(0, asked)
    chunks = [chunk for piece in pieces for chunk in choice.chunks(delta(piece), None)]
    chunks += choice.chunks(delta(""), reply("".join(pieces)))
    found = [msgspec.json.decode(ENCODER.encode(chunk)) for chunk in chunks]
    assert not any(map(says_nothing, found))
    assert len(found) == number


@pytest.mark.parametrize(
    "fields",
    [
        {"return_token_ids": True},
        {"logprobs": 0},
        {"stream_options": StreamOptions(continuous_usage_stats=True)},
    ],
)
def test_tokens_without_text_have_a_chunk_where_it_says_more(fields: dict[str, Any]) -> None:
    name, value = next(iter(fields.items()))
    choice = ChatChoice(0, request(has_tools=True, **{name: value if name != "logprobs" else True}))
    given = {"logprobs": [logprob("a")]} if name == "logprobs" else {}
    counts = [len(list(choice.chunks(delta(piece, **given), None))) for piece in WEATHER]
    assert counts[0] == 2  # the role's
    assert min(counts) == 1
    assert not list(choice.chunks(delta("", token_ids=[]), None))


def test_tokens_without_text_have_a_chunk_of_a_text_completion() -> None:
    """Match vLLM, whose benchmark measures the time between chunks."""
    text = CompletionChoice(0, COMPLETION)
    for piece in ("", "a", ""):
        (chunk,) = text.chunks(delta(piece), None)
        assert (chunk.text, chunk.finish_reason) == (piece, None)
    (last,) = text.chunks(delta(""), reply("a"))
    assert (last.text, last.finish_reason) == ("", "stop")
    assert not list(CompletionChoice(0, COMPLETION).chunks(None, None))


def test_the_reason_comes_with_the_last_token() -> None:
    """Match vLLM, whose benchmark counts each chunk as a token."""
    (chunk,) = CompletionChoice(0, COMPLETION).chunks(delta("a"), reply("a"))
    assert (chunk.text, chunk.finish_reason) == ("a", "stop")
    for text in ("a", ""):
        role, chat = ChatChoice(0, request()).chunks(delta(text), reply(text))
        assert (role.finish_reason, chat.delta.content, chat.finish_reason) == (None, text, "stop")
    held = ChatChoice(0, request())
    list(held.chunks(delta("\n"), None))
    (chat,) = held.chunks(delta(""), reply("\n"))
    assert (chat.delta.content, chat.finish_reason) == ("\n", "stop")


def test_an_echo_comes_with_the_first_piece() -> None:
    choice = CompletionChoice(3, COMPLETION, "2+2=")
    assert [one.text for one in choice.chunks(delta("4"), None)] == ["2+2=4"]
    assert [one.text for one in choice.chunks(delta("!"), None)] == ["!"]
    (last,) = choice.chunks(None, reply("4!"))
    assert (last.index, last.text, last.finish_reason) == (3, "", "stop")


def test_logprobs_of_an_echo_come_with_the_first_piece() -> None:
    asked = msgspec.structs.replace(COMPLETION, prompt_logprobs=1, return_token_ids=True)
    of_prompt = [None, logprob("=")]
    for first, last in (
        (delta("4", logprobs=[logprob("4")], prompt_logprobs=of_prompt), None),
        (None, reply("", logprobs=[], prompt_logprobs=of_prompt)),  # nothing but the echo
    ):
        choice = CompletionChoice(0, asked, "2=")
        (piece,) = choice.chunks(first, last)
        assert piece.logprobs is not None
        assert piece.logprobs.tokens == ["2", "=", *("4" if first else "")]
        assert piece.prompt_logprobs == prompt_logprobs(of_prompt)
        (other,) = choice.chunks(
            delta("!", logprobs=[logprob("!")], prompt_logprobs=of_prompt), None
        )
        assert other.logprobs is not None
        assert other.logprobs.tokens == ["!"]
        assert other.prompt_logprobs is UNSET


@pytest.mark.parametrize("starts", [True, False])
def test_the_reply_says_whether_the_text_begins_with_reasoning(starts: bool) -> None:
    """The prompt of one request may end within a thought, and that of the next may not."""
    text = 'Well\n</think>\n\n{"a": 1}'
    expected = ("Well", '{"a": 1}') if starts else ("", text)
    fields = span(text, starts)
    end, choice = reply(text, **fields), ChatChoice(0, request())
    message = ChatChoice(0, request()).whole(end).message
    assert (message.reasoning_content or "", message.content) == expected
    chunks = [one for letter in text for one in choice.chunks(delta(letter, **fields), None)]
    found = [msgspec.to_builtins(one) for one in (*chunks, *choice.chunks(None, end))]
    assert (joined(found, "reasoning_content"), joined(found, "content")) == expected
