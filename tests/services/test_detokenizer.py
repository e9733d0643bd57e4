"""Text is a pure function of token ids: characters over token borders, stop strings, moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock.protocol.config import Config
from penstock.protocol.messages import StopFound, StreamOpened, TokenDelta
from penstock.protocol.plan import pack
from penstock.services.detokenizer import Detokenizer, TextStream, token_bytes

DEMO = Config().model_folder
TABLE = token_bytes(DEMO)
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(DEMO)
TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab你🙂")))


def ids(text: str) -> list[int]:
    """The demo model's tokens are bytes; its tokenizer would take `<|im_start|>` for one token."""
    return list(text.encode())


def opened(prompt: str = "", output: str = "", stop: list[str] | None = None) -> StreamOpened:
    return StreamOpened(
        stream_id=1,
        request_id="r",
        attempt=0,
        prompt_tail=pack(ids(prompt)[-4:]),
        output_token_ids=pack(ids(output)),
        stop=stop or [],
    )


def text_of(token_ids: list[int], stop: list[str] | None = None) -> str:
    """The text of tokens that come one by one."""
    stream = TextStream(opened(stop=stop), TABLE)
    text = ""
    for token_id in token_ids:
        text += stream.feed([token_id]).text
        if stream.stopped:
            return text
    return text + stream.end("length").text


@given(TEXTS)
def test_text_survives(text: str) -> None:
    assert text_of(ids(text)) == text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_are_decoded_as_by_transformers(token_ids: list[int]) -> None:
    assert text_of(token_ids) == TOKENIZER.decode(token_ids, clean_up_tokenization_spaces=False)


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(opened(), TABLE)
    assert [stream.feed([token_id]).text for token_id in ids("é🙂")] == ["", "é", "", "", "", "🙂"]


def test_a_character_cut_by_the_end_of_the_output() -> None:
    assert text_of(ids("a🙂")[:-1]) == "a\ufffd"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_by_the_end_of_the_prompt(cut: int) -> None:
    """The output has the whole character: the prompt, as text, lacks it."""
    token_ids = ids("né🙂")
    message = opened()
    message.prompt_tail = pack(token_ids[:-cut][-4:])
    stream = TextStream(message, TABLE)
    assert stream.feed(token_ids[-cut:]).text == "🙂"


def test_special_tokens_have_no_text() -> None:
    assert text_of([*ids("a"), TOKENIZER.convert_tokens_to_ids("<|im_end|>"), *ids("b")]) == "ab"


@given(TEXTS, st.lists(st.sampled_from(["ab", "ba", "b你", "aaa", "🙂", "x"]), min_size=1))
def test_stop_strings(text: str, stop: list[str]) -> None:
    """Against a slow reference: the shortest prefix of the text that has a stop string in it."""
    expected = text
    for end in range(len(text) + 1):
        found = [at for at in (text[:end].find(s) for s in stop) if at >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert text_of(ids(text), stop) == expected


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    stream = TextStream(opened(stop=["lo w"]), TABLE)
    delta = stream.feed(ids("hello world"))
    assert delta.text == "hel"
    assert delta.token_ids == ids("hello w")
    assert delta.finish_reason == "stop"


def test_a_stop_string_ends_the_stream_once() -> None:
    detokenizer = Detokenizer(TABLE)
    first, second = ids("ab")
    message = TokenDelta(1, [opened(stop=["a"])], pack([1]), pack([first]))
    deltas, stops = detokenizer.handle(message)
    assert [d.finish_reason for d in deltas] == [None, "stop"]
    assert stops == [StopFound("r", 0)]
    late = TokenDelta(1, [], pack([1]), pack([second]), [(1, "length")])
    assert detokenizer.handle(late) == ([], [])


@given(TEXTS, st.integers(0, 20))
def test_a_stream_that_moves_has_the_same_text(text: str, at: int) -> None:
    """Another detokenizer is given all tokens so far, and goes on."""
    token_ids = ids(text)
    moved = opened()
    moved.output_token_ids = pack(token_ids[:at])
    rest = token_ids[at:]
    message = TokenDelta(1, [moved], pack([1] * len(rest)), pack(rest), finished=[(1, "length")])
    deltas, _ = Detokenizer(TABLE).handle(message)
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == token_ids
    assert deltas[-1].finish_reason == "length"
    position = 0
    for delta in deltas:
        assert delta.char_offset == position
        position += len(delta.text)


def test_messages_of_an_older_scheduler_are_dropped() -> None:
    detokenizer = Detokenizer(TABLE)
    detokenizer.handle(TokenDelta(2, [opened()]))
    assert detokenizer.handle(TokenDelta(1, [], pack([1]), pack([65]))) == ([], [])
    assert detokenizer.handle(TokenDelta(3, [], pack([1]), pack([65]))) == ([], [])
