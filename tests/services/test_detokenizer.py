"""Text is a pure function of token ids: characters over token borders, stop strings, moves."""

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from penstock.protocol.config import Config
from penstock.protocol.messages.client import TokenLogprobs
from penstock.protocol.messages.packed import PackedLogprobs, pack
from penstock.protocol.messages.pipeline import StepTokens, StopFound, StreamDelta, StreamOpened
from penstock.services.detokenizer.process import Detokenizer, LostError
from penstock.services.detokenizer.text_stream import TextStream, token_bytes

DEMO = Config().model_folder
TABLE = token_bytes(DEMO)
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(DEMO)
TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab你🙂")))


def ids(text: str) -> list[int]:
    """Return bytes, the demo model's tokens; its tokenizer knows `<|im_start|>` as one token."""
    return list(text.encode())


def opened(
    prompt: str = "", output: str = "", stop: list[str] | None = None, **options: Any
) -> StreamOpened:
    return StreamOpened(
        stream_id=1,
        request_id="r",
        attempt=0,
        prompt_tail=pack(ids(prompt)[-4:]),
        output_token_ids=pack(ids(output)),
        stop=stop or [],
        **options,
    )


def text_of(token_ids: list[int], stop: list[str] | None = None, **options: Any) -> str:
    """Return the text of tokens that come one by one."""
    stream = TextStream(opened(stop=stop, **options), TABLE)
    text = ""
    for token_id in token_ids:
        text += stream.feed([token_id]).text
        if stream.stopped:
            return text
    return text + stream.end("length").text


def test_a_token_that_ends_the_output_has_no_text() -> None:
    end = ord("5")
    assert text_of(ids("345"), stop_token_ids=[end]) == "34"
    assert (
        text_of(ids("345"), stop_token_ids=[end], include_stop_str_in_output=True)
        == text_of(ids("345"))
        == "345"
    )
    assert text_of([52, 258], skip_special_tokens=False) == "4<|im_end|>"
    assert text_of([52, 258], skip_special_tokens=False, stop_token_ids=[258]) == "4"


@given(st.lists(st.integers(0, 255) | st.integers(250, 261), max_size=40), st.booleans())
def test_any_tokens_are_decoded_as_by_transformers(token_ids: list[int], skips: bool) -> None:
    assert text_of(token_ids, skip_special_tokens=skips) == TOKENIZER.decode(
        token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
    )


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(opened(), TABLE)
    assert [stream.feed([token_id]).text for token_id in ids("é🙂")] == ["", "é", "", "", "", "🙂"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_by_the_end_of_the_prompt(cut: int) -> None:
    """The output has the whole character: the prompt, as text, lacks it."""
    token_ids = ids("né🙂")
    message = opened()
    message.prompt_tail = pack(token_ids[:-cut][-4:])
    stream = TextStream(message, TABLE)
    assert stream.feed(token_ids[-cut:]).text == "🙂"


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("output", ["", "a", "é", "\ufffd"])
def test_a_character_that_the_prompt_leaves_unfinished(cut: int, output: str) -> None:
    """The output has no trace of a character that it does not continue."""
    message = opened()
    message.prompt_tail = pack(ids("né🙂")[:-cut][-4:])
    for batches in ([ids(output)], [[token_id] for token_id in ids(output)]):
        stream = TextStream(message, TABLE)
        text = "".join(stream.feed(batch).text for batch in batches)
        assert text + stream.end("stop").text == output


def test_a_character_that_the_output_continues_and_breaks() -> None:
    message = opened()
    message.prompt_tail = pack([0xF0, 0x9F])
    stream = TextStream(message, TABLE)
    assert stream.feed([0x99, *b"a"]).text == "\ufffda"


@given(
    TEXTS | st.text("ab"),
    st.lists(st.sampled_from(["a", "ab", "ba", "b你", "aaa", "abab", "🙂", "x"]), min_size=1),
    st.booleans(),
    st.integers(0, 6),
)
def test_stop_strings(text: str, stop: list[str], keeps_stop: bool, min_tokens: int) -> None:
    """Stop strings are found as by a slow reference.

    The reference takes the shortest prefix of more than `min_tokens` tokens that ends with a stop
    string, and the longest such stop string.
    """
    expected = text
    for end in range(len(text) + 1):
        prefix = text[:end]
        found = [s for s in stop if prefix.endswith(s) and len(ids(prefix)) > min_tokens]
        if found:
            expected = prefix if keeps_stop else prefix[: -max(map(len, found))]
            break
    options = {"include_stop_str_in_output": keeps_stop, "min_tokens": min_tokens}
    assert text_of(ids(text), stop, **options) == expected


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    stream = TextStream(opened(stop=["lo w"]), TABLE)
    delta = stream.feed(ids("hello world"))
    assert delta.text == "hel"
    assert delta.token_ids == ids("hello w")
    assert delta.finish_reason == "stop"


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_the_stop_string_that_ended_the_text_is_reported(keeps_stop: bool) -> None:
    stream = TextStream(
        opened(stop=["zz", "lo", "low"], include_stop_str_in_output=keeps_stop), TABLE
    )
    deltas = [stream.feed([token_id]) for token_id in ids("hello")]
    assert [delta.stop_reason for delta in deltas] == [None] * 4 + ["lo"]
    assert TextStream(opened(stop=["zz"]), TABLE).end("stop").stop_reason is None


def test_times_are_sent_once() -> None:
    stream = TextStream(opened(phase_seconds=(0.25, 0.5)), TABLE)
    deltas = [stream.feed([token_id]) for token_id in ids("abc")]
    assert [one.phase_seconds for one in deltas] == [(0.25, 0.5), (0.0, 0.0), (0.0, 0.0)]


def test_a_stop_string_ends_the_stream_once() -> None:
    detokenizer = Detokenizer(TABLE)
    first, second = ids("ab")
    message = StepTokens(1, [opened(stop=["a"])], pack([1]), pack([first]))
    deltas, stops = detokenizer.handle(message)
    assert [d.finish_reason for d in deltas] == [None, "stop"]
    assert stops == [StopFound("r", 0)]
    late = StepTokens(1, [], pack([1]), pack([second]), [(1, "length")])
    assert detokenizer.handle(late) == ([], [])


@given(TEXTS, st.integers(0, 20))
def test_a_stream_that_moves_has_the_same_text(text: str, at: int) -> None:
    """Another detokenizer gets all tokens so far, and continues."""
    token_ids = ids(text)
    moved = opened()
    moved.output_token_ids = pack(token_ids[:at])
    rest = token_ids[at:]
    message = StepTokens(1, [moved], pack([1] * len(rest)), pack(rest), finished=[(1, "length")])
    deltas, _ = Detokenizer(TABLE).handle(message)
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == token_ids
    assert deltas[-1].finish_reason == "length"
    position = 0
    for delta in deltas:
        assert delta.char_offset == position
        position += len(delta.text)


def test_a_missing_message_is_noticed_before_it_makes_wrong_text() -> None:
    """After a broken connection all is sent again, and counted from 1."""
    detokenizer = Detokenizer(TABLE)

    def tell(number: int, text: str, *opened: StreamOpened) -> str:
        token_ids = ids(text)
        message = StepTokens(1, list(opened), pack([1] * len(token_ids)), pack(token_ids))
        message.number = number
        deltas, _ = detokenizer.handle(message)
        return "".join(delta.text for delta in deltas)

    assert tell(1, "a", opened()) + tell(2, "b") == "ab"
    with pytest.raises(LostError):
        tell(4, "d")
    detokenizer.forget()
    assert [tell(number, "e") for number in (5, 6, 2)] == ["", "", ""]
    assert tell(1, "e", opened(output="abcd")) + tell(2, "f") == "abcdef"
    assert tell(1, "") + tell(2, "g") == "", "all streams are to be opened after a first message"


def test_messages_of_an_older_scheduler_are_dropped() -> None:
    detokenizer = Detokenizer(TABLE)
    detokenizer.handle(StepTokens(2, [opened()]))
    assert detokenizer.handle(StepTokens(1, [], pack([1]), pack([65]))) == ([], [])
    assert detokenizer.handle(StepTokens(3, [], pack([1]), pack([65]))) == ([], [])


# ---- logprobs --------------------------------------------------------------------------------


def packed(*token_ids: int) -> PackedLogprobs:
    """Return the token that stands there and others; the n-th has a logprob of -n / 2."""
    values = array("f", [-number / 2 for number in range(len(token_ids))])
    return PackedLogprobs(pack(token_ids), values.tobytes())


END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def test_logprobs_have_text_and_bytes_of_each_token() -> None:
    """Special tokens have their names, whether the text has them or not."""
    (first, *_), unknown = ids("🙂"), 10_000
    stream = TextStream(opened(logprobs=[]), TABLE)
    position = packed(65, first, END, unknown)
    position.rank = 7
    (told,) = stream.feed([65], [position]).logprobs or []
    shown = msgspec.to_builtins(told)
    top = [list(one.values()) for one in shown.pop("top")]
    assert shown == {"token_id": 65, "logprob": 0.0, "token": "A", "bytes": [65], "rank": 7} | {
        "text_offset": 0
    }
    assert top == [
        [first, -0.5, 1, "\ufffd", [first]],
        [END, -1.0, 2, "<|im_end|>", [*b"<|im_end|>"]],
        [unknown, -1.5, 3, "", []],
    ]


def token_ids_of(logprobs: list[TokenLogprobs | None] | None) -> list[int | None]:
    assert logprobs is not None
    return [one and one.token_id for one in logprobs]


def test_logprobs_come_with_their_tokens() -> None:
    """Logprobs come in the streams that asked; None where an earlier attempt had them."""
    asked = opened(output="ab", logprobs=[None, packed(98)], prompt_logprobs=[packed(49)])
    silent = opened()
    silent.stream_id = 2
    message = StepTokens(1, [asked, silent], pack([2, 1]), pack([66, 67]))
    message.logprobs = [(1, packed(67))]
    deltas, _ = Detokenizer(TABLE).handle(message)
    assert [delta.token_ids for delta in deltas] == [[97, 98], [], [66], [67]]
    assert token_ids_of(deltas[0].logprobs) == [None, 98]
    assert of_prompt(deltas[0]) == (0, [49])
    assert (deltas[1].logprobs, deltas[2].logprobs) == (None, None)
    assert token_ids_of(deltas[3].logprobs) == [67]
    assert [delta.prompt_logprobs for delta in deltas[1:]] == [None] * 3


def of_prompt(delta: StreamDelta) -> tuple[int, list[int]]:
    """Return (offset, token ids) of a piece."""
    assert delta.prompt_logprobs is not None
    decoded = [msgspec.msgpack.decode(raw, type=TokenLogprobs) for raw in delta.prompt_logprobs]
    return delta.prompt_offset, [known.token_id for known in decoded]


def test_logprobs_of_a_prompt_come_in_the_pieces_in_which_they_are_told() -> None:
    """The stream is opened with each; a prompt of one token has none, but they were requested."""
    detokenizer = Detokenizer(TABLE)
    none, first = opened(prompt_logprobs=[]), opened(prompt_logprobs=[packed(49), packed(50)])
    last = opened(output="a", prompt_logprobs=[packed(51)], prompt_offset=2)
    deltas = [detokenizer.handle(StepTokens(1, [each]))[0][0] for each in (none, first, last)]
    assert [of_prompt(delta) for delta in deltas] == [(0, []), (0, [49, 50]), (2, [51])]
    assert [delta.text for delta in deltas] == ["", "", "a"]
    deltas, _ = detokenizer.handle(StepTokens(1, [], pack([1]), pack([98])))
    assert [(delta.text, delta.prompt_logprobs) for delta in deltas] == [("b", None)]


def test_logprobs_behind_a_stop_string_are_dropped() -> None:
    message = opened(output="axbc", stop=["x"], logprobs=[packed(token) for token in b"axbc"])
    deltas, _ = Detokenizer(TABLE).handle(StepTokens(1, [message]))
    assert [delta.token_ids for delta in deltas] == [ids("ax")]
    assert token_ids_of(deltas[0].logprobs) == ids("ax")


def test_a_stream_with_fewer_logprobs_than_tokens_fails() -> None:
    detokenizer = Detokenizer(TABLE)
    deltas, _ = detokenizer.handle(StepTokens(1, [opened(output="ab", logprobs=[None])]))
    assert deltas == []
    assert [failure.error.code for failure in detokenizer.failures] == ["failed"]


@pytest.mark.parametrize("where", ["__init__", "feed"])
def test_a_stream_that_raises_is_failed_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(TextStream, where)

    def fail(self: TextStream, *args: Any) -> Any:
        if where == "feed" and self.request_id == "bad":
            raise KeyError("a defect")
        if where == "__init__" and args[0].request_id == "bad":
            raise KeyError("a defect")
        return real(self, *args)

    monkeypatch.setattr(TextStream, where, fail)
    detokenizer = Detokenizer(TABLE)
    streams = [opened(output="a"), opened(output="b")]
    streams[1].stream_id, streams[1].request_id = 2, "bad"
    deltas, _ = detokenizer.handle(StepTokens(1, streams, number=1))
    more = StepTokens(1, stream_ids=pack([2, 1]), token_ids=pack([98, 97]), number=2)
    deltas += detokenizer.handle(more)[0]
    assert [(one.request_id, one.text) for one in deltas] == [("r", "a"), ("r", "a")]
    [failed] = detokenizer.failures
    assert (failed.request_id, failed.error.code) == ("bad", "failed")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_logprobs_have_the_offsets_of_their_text(size: int) -> None:
    """Special tokens and parts of characters add none; text that is held back is counted."""
    tokens = [*ids("a🙂b"), END, *ids("xc")]
    stream = TextStream(opened(logprobs=[], stop=["xy"]), TABLE)
    offsets = []
    for start in range(0, len(tokens), size):
        some = tokens[start : start + size]
        logprobs = stream.feed(some, [packed(token) for token in some]).logprobs or []
        offsets += [one and one.text_offset for one in logprobs]
    assert offsets == [0, 1, 1, 1, 1, 2, 3, 3, 4]
