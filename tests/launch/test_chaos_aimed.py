"""`launch chaos --aimed` without a pipeline: what counts as an attack that succeeded."""

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from penstock.launch.chaos import aimed, victim
from penstock.launch.chaos.aimed import Result
from penstock.launch.chaos.victim import Attack, Victim


class Nobody:
    """Stands in for innocent clients that ask nothing."""

    num_asked = num_lost = num_different = 0

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def wait(self) -> None:
        """Return at once."""


class Bare(Victim):
    """A pipeline that is one process, without a gateway."""

    num_restarts = 0

    def __init__(self, supervisor: psutil.Process) -> None:
        self.supervisor = supervisor

    def begin(self) -> None:
        self.innocents = Nobody()  # type: ignore[assignment]

    def peak_bytes(self) -> int:
        return 0


@pytest.fixture
def process() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


@pytest.mark.parametrize("is_to_end", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_a_pipeline_ends_if_the_attack_is_to_end_it(
    process: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
    is_to_end: bool,
    ends: bool,
) -> None:
    def run(one: Victim) -> None:
        if ends:
            process.kill()
            if not is_to_end:
                one.supervisor.wait()

    monkeypatch.setattr(victim, "END_TIMEOUT", 5.0 if ends else 0.0)
    result = Result("one")
    pipeline = Bare(psutil.Process(process.pid))
    aimed._attack(Attack("one", ends=is_to_end)(run), pipeline, result)
    assert result.has_ended is ends
    assert result.is_fault is (ends is not is_to_end)
    assert f"| {'ended' if ends else 'runs'} |" in str(result)
