"""How long a worker says that it has been at one step."""

from penstock.protocol.sockets import HEARTBEAT_INTERVAL
from penstock.services.worker.watchdog import MAX_MISSED, Watchdog


def test_a_time_in_which_nothing_ran_belongs_to_no_step() -> None:
    watchdog = Watchdog()
    watchdog.progress()
    watchdog._busy_since = watchdog._now() - 9000
    watchdog.waited(MAX_MISSED * HEARTBEAT_INTERVAL)  # a busy machine
    assert watchdog.busy_seconds() >= 9000
    watchdog.waited(7200)  # a suspended one
    assert 1800 <= watchdog.busy_seconds() < 9000
    watchdog.rest()
    assert watchdog.busy_seconds() == 0
