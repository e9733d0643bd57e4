"""A request that has ended processes is refused when it is sent again."""

from collections.abc import Callable

from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.pipeline import RequestFailed
from penstock.protocol.messages.status import ProcessStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.services.gateway.poison import digest
from tests.services.gateway.conftest import GatewayHarness, request

Start = Callable[..., GatewayHarness]
GATEWAY = ProcessStatus(name="gateway.1", pid=5, uptime=1.0, restarts=1)


def fail(harness: GatewayHarness, request_id: str, is_poison: bool) -> None:
    """Send a scheduler's verdict on a request."""
    entry = harness.gateway.ledger.get(request_id)
    assert entry
    error = ErrorReply(code="failed", message="no")
    harness.detokenizer.send(RequestFailed(request_id, entry.attempt, error, is_poison))


def test_the_same_request_is_refused_and_others_are_not(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "poison", "twin", "runs")
    harness.submit(client, "other", temperature=0.5)
    for _ in range(4):
        harness.tokenize()
    harness.send_tokens("runs", 0, 1)
    fail(harness, "poison", is_poison=True)
    failed = [harness.receive_reply(client) for _ in range(2)]
    assert [(it.code, it.request_id) for it in failed] == [("failed", "poison"), ("failed", "twin")]
    assert harness.gateway.ledger.get("runs") and harness.gateway.ledger.get("other")
    harness.send(client, request("again", seed=7, stream=True, output_token_ids=[1]))
    refused = harness.receive_reply(client)
    assert (refused.code, refused.field) == ("failed", None)
    assert "it is not tried again" in refused.message
    harness.submit(client, "longer", prompt=[9, 9])


def test_what_fails_otherwise_may_be_sent_again(start_gateway: Start) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a")
    fail(harness, "a", is_poison=False)
    assert harness.receive_reply(client).code == "failed"
    harness.submit(client, "again")


def test_a_gateway_that_restarted_refuses_what_was_given_up_before(start_gateway: Start) -> None:
    """Whichever replica it would go to: the supervisor remembers it."""
    harness = start_gateway()
    client = harness.connect()
    poison = digest(request("a"))
    harness.detokenizer.send(SupervisorReport([GATEWAY], poison=[poison]))
    harness.run_until(lambda: harness.gateway.status.processes)
    harness.send(client, request("again", seed=7))
    assert "it is not tried again" in harness.receive_reply(client).message
    harness.submit(client, "other", prompt=[9, 9])
