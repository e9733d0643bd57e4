"""A request that has ended processes is refused when it is sent again."""

from collections.abc import Callable

from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.status import ProcessStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.messages.tokenizer import RequestFailed
from penstock.services.gateway.validation import digest
from tests.services.gateway.conftest import Stage, request

Start = Callable[..., Stage]
GATEWAY = ProcessStatus(name="gateway.1", pid=5, uptime=1.0, restarts=1)


def fail(one: Stage, request_id: str, is_poison: bool) -> None:
    """Send a scheduler's verdict on a request."""
    entry = one.gateway.ledger.get(request_id)
    assert entry
    error = ErrorReply(code="failed", message="no")
    one.detokenizer.send(RequestFailed(request_id, entry.attempt, error, is_poison))


def test_the_same_request_is_refused_and_others_are_not(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "poison", "twin", "runs")
    one.open(client, "other", temperature=0.5)
    for _ in range(4):
        one.tokenize()
    one.generate("runs", 0, 1)
    fail(one, "poison", is_poison=True)
    failed = [one.hear(client) for _ in range(2)]
    assert [(it.code, it.request_id) for it in failed] == [("failed", "poison"), ("failed", "twin")]
    assert one.gateway.ledger.get("runs") and one.gateway.ledger.get("other")
    one.ask(client, request("again", seed=7, stream=True, output_token_ids=[1]))
    refused = one.hear(client)
    assert (refused.code, refused.field) == ("failed", None)
    assert "it is not tried again" in refused.message
    one.open(client, "longer", prompt=[9, 9])


def test_what_fails_otherwise_may_be_sent_again(stage: Start) -> None:
    one = stage()
    client = one.connect()
    one.open(client, "a")
    fail(one, "a", is_poison=False)
    assert one.hear(client).code == "failed"
    one.open(client, "again")


def test_a_gateway_that_restarted_refuses_what_was_given_up_before(stage: Start) -> None:
    """Whichever replica it would go to: the supervisor remembers it."""
    one = stage()
    client = one.connect()
    poison = digest(request("a"))
    one.detokenizer.send(SupervisorReport([GATEWAY], poison=[poison]))
    one.work_until(lambda: one.gateway.processes)
    one.ask(client, request("again", seed=7))
    assert "it is not tried again" in one.hear(client).message
    one.open(client, "other", prompt=[9, 9])
