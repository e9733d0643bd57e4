"""`launch chaos`, small: kills of every kind, some of them together or during a recovery."""

import json
import subprocess
import sys

import pytest

from penstock.launch.chaos.mix import MIX

pytestmark = [pytest.mark.chaos, pytest.mark.long]
KILLS = 6
CHAOS = [
    *(sys.executable, "-P", "-m", "penstock.launch", "chaos", "--json"),
    *("--tp", "2", "--device", "cpu", "--num-threads", "1", "--kv-cache-gib", "0.1"),
    *("--kills", str(KILLS), "--seed", "22", "--abort-share", "0.2"),
    *("--num-requests", "60", "--concurrency", "12", "--distinct", "22", "--mix", "all"),
    *("--recovery-timeout", "60"),
]


def test_nothing_is_lost_or_doubled() -> None:
    run = subprocess.run(CHAOS, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr + run.stdout
    report = json.loads(run.stdout)
    row = report["rows"]["all"]
    assert row["sigkill"] + row["sigstop"] == KILLS <= sum(report["restarts"].values())
    assert row["requests_running"] > 0
    wrong = ("requests_lost", "tokens_lost", "tokens_doubled", "torn", "different", "not_recovered")
    assert {name: row[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert report["faults"] == report["left"] == []
    assert report["used_blocks"] == report["open_requests"] == 0
    assert report["requests"] >= 60
    assert report["aborted"] > 0
    assert report["by_request"].keys() == MIX.keys() - {"embeddings"}
