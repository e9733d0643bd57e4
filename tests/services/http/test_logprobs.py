"""Logprobs in the shapes of chats and completions."""

import msgspec

from penstock.protocol.messages.logprobs import Logprob
from penstock.services.http.chat import ChatChoice
from penstock.services.http.completions import CompletionChoice
from penstock.services.http.logprobs import (
    chat_logprobs,
    completion_logprobs,
    first_token,
    prompt_logprobs,
)
from penstock.services.http.replies import ENCODER
from tests.services.http.test_choices import COMPLETION, delta, logprob, reply, request


def test_logprobs_of_a_chat() -> None:
    other = Logprob(token_id=1, token="b", logprob=-2.0, bytes=[98])  # noqa: S106
    choice = ChatChoice(0, request())
    (chunk,) = choice.grow(delta("a", logprobs=[logprob("a", -1.0, other)]))
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
    (chunk,) = choice.grow(delta("<", logprobs=[logprob("<")]))
    assert chunk.logprobs
    assert chunk.delta.content == ""


def test_tokens_named_by_their_ids() -> None:
    other = Logprob(token_id=1, token="b", logprob=-2.0, bytes=[98])  # noqa: S106
    tokens = [logprob("a", -1.0, other), None]
    of_chat = chat_logprobs(tokens, names_ids=True)
    assert of_chat
    assert of_chat.content[0].token == "token_id:97"  # noqa: S105
    assert of_chat.content[0].top_logprobs[0].token == "token_id:1"  # noqa: S105
    of_completion = completion_logprobs(tokens, 3, names_ids=True)
    assert of_completion
    assert of_completion.tokens == ["token_id:97", ""]
    assert of_completion.top_logprobs[0] == {"token_id:97": -1.0, "token_id:1": -2.0}
    assert of_completion.text_offset == [3, 4]


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


def test_offsets_go_on_behind_what_was_sent() -> None:
    choice = CompletionChoice(0, COMPLETION)
    for text, offset in (("ab", 0), ("c", 2)):
        (piece,) = choice.grow(delta(text, logprobs=[logprob(text[0])]))
        assert piece.logprobs
        assert piece.logprobs.text_offset == [offset]


def test_tokens_of_which_nothing_is_known() -> None:
    logprobs = completion_logprobs([None, logprob("a")], 0)
    assert logprobs
    assert logprobs.token_logprobs == [None, -1.0]


def test_the_first_token_of_a_prompt() -> None:
    assert first_token("né", [None, *[logprob("x")] * 2]) == "n"
    assert first_token("ab", [None, logprob("b")]) == "a"


def test_prompt_logprobs_have_ranks() -> None:
    other = Logprob(token_id=1, token="x", logprob=-0.1, bytes=[120])  # noqa: S106
    first, second = prompt_logprobs([None, logprob("b", -3.0, other)])
    assert first is None
    assert second
    assert second["1"].rank == 1
    assert second["98"].rank is None
    assert second["98"].decoded_token == "b"  # noqa: S105
