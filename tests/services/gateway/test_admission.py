"""What is refused when there is too much, and when to come again."""

import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.client import JSON, GenerateRequest, TextDelta
from penstock.services.gateway.admission import NUM_SAMPLES, Overload
from penstock.services.gateway.connections import Client, Connection
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.shares import Share
from penstock.services.gateway.tokenizer_queries import Questions
from penstock.services.gateway.validation import RefusedError

NO_QUESTIONS = Questions(0, outbox=None, tokenizers=None)  # type: ignore[arg-type]


def fill(ledger: Ledger, number: int, num_tokens: int = 1, num_bytes: int = 0) -> list[Entry]:
    """So many requests come in."""
    entries = []
    for _ in range(number):
        request = GenerateRequest(prompt=[1] * num_tokens)
        client = Client((b"c",), JSON, Connection())
        entries.append(Entry(request, f"{len(ledger)}", client, num_bytes))
        ledger.add(entries[-1])
    return entries


def start(ledger: Ledger, entries: list[Entry]) -> None:
    """Their first tokens come."""
    for entry in entries:
        ledger.append(
            entry,
            TextDelta(
                request_id=entry.request_id,
                token_offset=0,
                char_offset=0,
                token_ids=[1],
                text="",
                attempt=entry.attempt,
            ),
        )


def refusal(overload: Overload, num_bytes: int = 0, num_tokens: int = 1) -> RefusedError:
    """Of the client that has everything."""
    share = Share("")
    share.num_open = share.num_waiting_tokens = share.num_bytes = 1 << 40
    with pytest.raises(RefusedError) as caught:
        overload.check(num_bytes, num_tokens, share)
    assert caught.value.reply.code == "overloaded"
    return caught.value


def test_requests() -> None:
    ledger = Ledger()
    overload = Overload(Config(max_num_seqs=2, max_waiting_requests=3), ledger, NO_QUESTIONS)
    fill(ledger, 4)
    overload.check(0, 1, Share(""))
    (last,) = fill(ledger, 1)
    assert str(refusal(overload)) == "overloaded: 5 requests are open; the limit is 5"
    ledger.answer(last, last.reply("stop"))
    overload.check(0, 1, Share(""))


def test_prompt_tokens_that_wait() -> None:
    ledger = Ledger()
    overload = Overload(Config(max_waiting_tokens=100), ledger, NO_QUESTIONS)
    overload.check(0, 5000, Share(""))  # nothing waits
    entries = fill(ledger, 2, num_tokens=40)
    overload.check(0, 20, Share(""))
    assert str(refusal(overload, num_tokens=21)) == (
        "overloaded: 101 prompt tokens would wait, 21 of this request; the limit is 100"
    )
    ledger.tokenized(entries[0], 60)
    refusal(overload, num_tokens=1)
    start(ledger, entries[:1])
    overload.check(0, 60, Share(""))
    start(ledger, entries[1:])
    overload.check(0, 5000, Share(""))


def test_bytes() -> None:
    ledger = Ledger()
    overload = Overload(Config(max_open_bytes=1000), ledger, NO_QUESTIONS)
    entries = fill(ledger, 3, num_bytes=300)
    overload.check(100, 1, Share(""))
    start(ledger, entries[:1])  # 8 bytes for its token
    assert str(refusal(overload, num_bytes=100)) == (
        "overloaded: open requests and their answers have 908 bytes, this request has 100; "
        "the limit is 1000"
    )
    ledger.close(entries[0])
    overload.check(100, 1, Share(""))


def retry_after(overload: Overload) -> float | None:
    return refusal(overload).reply.retry_after


def test_when_to_come_again() -> None:
    """30 wait, and 2 a second were started: in 15 seconds."""
    ledger = Ledger()
    overload = Overload(Config(max_num_seqs=1, max_waiting_requests=0), ledger, NO_QUESTIONS)
    entries = fill(ledger, 40)
    assert retry_after(overload) == 1.0  # nothing is known
    overload.sample(100.0)
    assert retry_after(overload) == 1.0
    start(ledger, entries[:10])
    overload.sample(105.0)
    assert retry_after(overload) == 15.0
    overload.sample(205.0)
    assert retry_after(overload) == 60.0  # the most
    start(ledger, entries[10:39])
    overload.sample(205.5)
    assert retry_after(overload) == pytest.approx(105.5 / 39)
    start(ledger, entries[39:])
    assert retry_after(overload) == 1.0  # the least
    fill(ledger, 10)
    for second in range(NUM_SAMPLES):
        overload.sample(300.0 + second)
    assert retry_after(overload) == 1.0  # what started before is forgotten
