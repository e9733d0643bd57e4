"""Logprobs in the shapes of chats and completions."""

import msgspec

from penstock.protocol.messages.client import Logprob
from penstock.services.http.generation.chat import ChatChoice
from penstock.services.http.generation.completions import CompletionChoice
from penstock.services.http.generation.generation import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from penstock.services.http.shared.errors import ENCODER
from tests.services.http.generation.reasoning_spans import delta, reply
from tests.services.http.generation.test_choices import COMPLETION, logprob, request


def test_logprobs_of_a_chat() -> None:
    other = Logprob(token_id=1, token="b", logprob=-2.0, bytes=[98], rank=1)  # noqa: S106
    choice = ChatChoice(0, request())
    _, chunk = choice.chunks(delta("a", logprobs=[logprob("a", -1.0, other)]), None)
    content = msgspec.json.decode(ENCODER.encode(chunk))["logprobs"]["content"]
    assert content == [
        {
            "token": "a",
            "logprob": -1.0,
            "bytes": [97],
            "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
        }
    ]


def test_logprobs_are_told_where_the_text_is_held_back() -> None:
    choice = ChatChoice(0, request())
    _, chunk = choice.chunks(delta("\n", logprobs=[logprob("\n")]), None)
    assert chunk.logprobs
    assert chunk.delta.content == ""


def test_tokens_named_by_their_ids() -> None:
    other = Logprob(token_id=1, token="b", logprob=-2.0, bytes=[98], rank=1)  # noqa: S106
    tokens = [logprob("a", -1.0, other), None]
    of_chat = chat_logprobs(tokens, names_ids=True)
    assert of_chat
    assert of_chat.content[0].token == "token_id:97"  # noqa: S105
    assert of_chat.content[0].top_logprobs[0].token == "token_id:1"  # noqa: S105
    of_completion = completion_logprobs(tokens, 3, names_ids=True)
    assert of_completion
    assert of_completion.tokens == ["token_id:97", ""]
    assert of_completion.top_logprobs[0] == {"token_id:97": -1.0, "token_id:1": -2.0}
    assert of_completion.text_offset == [3, 3]


def test_logprobs_of_an_echo() -> None:
    of_prompt = [None, logprob("b", -0.5)]
    whole = CompletionChoice(0, COMPLETION, "ab").whole(
        reply("c", logprobs=[logprob("c")], prompt_logprobs=of_prompt)
    )
    assert whole.text == "abc"
    assert whole.logprobs
    assert whole.logprobs.tokens == ["a", "b", "c"]
    assert whole.logprobs.token_logprobs == [None, -0.5, -1.0]
    assert whole.logprobs.text_offset == [0, 1, 2]
    assert whole.logprobs.top_logprobs == [None, {"b": -0.5}, {"c": -1.0}]


def test_offsets_are_those_of_the_text() -> None:
    """A token without text, or held back with the text before it, has the offset of the next."""
    choice = CompletionChoice(0, COMPLETION, "2+2=")
    for text, offset in (("ab", 0), ("", 2), ("c", 2)):
        token = logprob("x")
        token.text_offset = offset
        (piece,) = choice.chunks(delta(text, logprobs=[token]), None)
        assert piece.logprobs
        assert piece.logprobs.text_offset == [4 + offset]


def test_parts_of_characters_have_names_of_their_own() -> None:
    """Else they would be one key of `top_logprobs`."""

    def part(data: bytes, value: float) -> Logprob:
        text = data.decode(errors="replace")
        return Logprob(token_id=1, token=text, logprob=value, bytes=list(data), rank=1)

    parts = part(b"\xe2\x82", -2.0), part(b"\xe2", -3.0), part(b"\xef\xbf\xbd", -4.0)
    token = logprob("a", -1.0, *parts)
    logprobs = completion_logprobs([token])
    assert logprobs
    assert logprobs.top_logprobs == [
        {"a": -1.0, r"bytes:\xe2\x82": -2.0, r"bytes:\xe2": -3.0, "\ufffd": -4}
    ]


def test_tokens_of_which_nothing_is_known() -> None:
    logprobs = completion_logprobs([None, logprob("a")])
    assert logprobs
    assert logprobs.token_logprobs == [None, -1.0]


def test_the_first_token_of_a_prompt() -> None:
    """Give the first token the text that the other tokens leave; offsets count characters."""

    def echoed(prompt: str, *tokens: bytes) -> tuple[list[str], list[int]]:
        given = [logprob("x") for _ in tokens]
        for one, data in zip(given, tokens, strict=True):
            one.bytes, one.token = list(data), data.decode(errors="replace")
        logprobs = echoed_logprobs(prompt, [None, *given])
        return logprobs.tokens, logprobs.text_offset

    assert echoed("ab", b"b") == (["a", "b"], [0, 1])
    n, c, a = "né".encode()[0:1], "né".encode()[1:2], "né".encode()[2:3]
    assert n == b"n"
    assert echoed("néx", c, a, b"x") == (["n", r"bytes:\xc3", r"bytes:\xa9", "x"], [0, 1, 1, 2])


def test_prompt_logprobs_have_ranks() -> None:
    other = Logprob(token_id=1, token="x", logprob=-0.1, bytes=[120], rank=1)  # noqa: S106
    first, second = prompt_logprobs([None, logprob("b", -3.0, other, rank=7)])
    assert first is None
    assert second
    assert second["1"].rank == 1
    assert second["98"].rank == 7
    assert second["98"].decoded_token == "b"  # noqa: S105
