"""Requests refused by admission control, and when to retry."""

import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.client import JSON, GenerateRequest, TextDelta
from penstock.services.gateway.admission import NUM_SAMPLES, Admission, RefusedError
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.request import Client, Connection, Request, Share


def fill(
    ledger: Ledger, totals: Share, number: int, num_tokens: int = 1, num_bytes: int = 0
) -> list[Request]:
    """Open `number` requests."""
    entries = []
    for _ in range(number):
        request = GenerateRequest(prompt=[1] * num_tokens)
        client = Client((b"c",), JSON, Connection(), Share(""))
        entries.append(Request(request, f"{len(ledger)}", client, num_bytes))
        ledger.open(entries[-1], totals)
    return entries


def start(ledger: Ledger, entries: list[Request]) -> None:
    """Append the first token of each."""
    for entry in entries:
        num_bytes = entry.num_bytes
        entry.append(
            TextDelta(
                request_id=entry.request_id,
                token_offset=0,
                char_offset=0,
                token_ids=[1],
                text="",
                attempt=entry.attempt,
            ),
        )
        ledger.record_growth(entry, num_bytes)


def refusal(admission: Admission, num_bytes: int = 0, num_tokens: int = 1) -> RefusedError:
    """Return the share of a client that has all open work."""
    share = Share("")
    share.num_open = share.num_waiting_tokens = share.num_bytes = 1 << 40
    with pytest.raises(RefusedError) as caught:
        admission.check(num_bytes, num_tokens, share)
    assert caught.value.reply.code == "overloaded"
    return caught.value


def test_requests() -> None:
    ledger, totals = Ledger(), Share()
    admission = Admission(Config(max_num_seqs=2, max_waiting_requests=3), totals)
    fill(ledger, totals, 4)
    admission.check(0, 1, Share(""))
    (last,) = fill(ledger, totals, 1)
    assert str(refusal(admission)) == "overloaded: 5 requests are open; the limit is 5"
    ledger.answer(last, last.reply("stop"))
    admission.check(0, 1, Share(""))


def test_prompt_tokens_that_wait() -> None:
    ledger, totals = Ledger(), Share()
    admission = Admission(Config(max_waiting_tokens=100), totals)
    admission.check(0, 5000, Share(""))  # nothing waits
    entries = fill(ledger, totals, 2, num_tokens=40)
    admission.check(0, 20, Share(""))
    assert str(refusal(admission, num_tokens=21)) == (
        "overloaded: 101 prompt tokens would wait, 21 of this request; the limit is 100"
    )
    ledger.record_tokenized(entries[0], 60, b"")
    refusal(admission, num_tokens=1)
    start(ledger, entries[:1])
    admission.check(0, 60, Share(""))
    start(ledger, entries[1:])
    admission.check(0, 5000, Share(""))


def test_bytes() -> None:
    ledger, totals = Ledger(), Share()
    admission = Admission(Config(max_open_bytes=1000), totals)
    entries = fill(ledger, totals, 3, num_bytes=300)
    admission.check(100, 1, Share(""))
    start(ledger, entries[:1])  # 8 bytes for its token
    assert str(refusal(admission, num_bytes=100)) == (
        "overloaded: open requests and their answers have 908 bytes, this request has 100; "
        "the limit is 1000"
    )
    ledger.remove(entries[0])
    admission.check(100, 1, Share(""))


def retry_after(admission: Admission) -> float | None:
    return refusal(admission).reply.retry_after


def test_when_to_come_again() -> None:
    """30 wait, and 2 a second were started: in 15 seconds."""
    ledger, totals = Ledger(), Share()
    admission = Admission(Config(max_num_seqs=1, max_waiting_requests=0), totals)
    entries = fill(ledger, totals, 40)
    assert retry_after(admission) == 1.0  # nothing is known
    admission.sample(100.0)
    assert retry_after(admission) == 1.0
    start(ledger, entries[:10])
    admission.sample(105.0)
    assert retry_after(admission) == 15.0
    admission.sample(205.0)
    assert retry_after(admission) == 60.0  # the most
    start(ledger, entries[10:39])
    admission.sample(205.5)
    assert retry_after(admission) == pytest.approx(105.5 / 39)
    start(ledger, entries[39:])
    assert retry_after(admission) == 1.0  # the least
    fill(ledger, totals, 10)
    for second in range(NUM_SAMPLES):
        admission.sample(300.0 + second)
    assert retry_after(admission) == 1.0  # what started before is forgotten
