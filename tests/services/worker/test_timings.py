"""The parts of a start, and traces of steps."""

import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.protocol.config import Config, make_run_folder
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.services.worker.loading import load
from penstock.services.worker.timings import FIRST_STEP, StartTimes, _started_at


def test_parts_follow_one_another_from_the_start_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = StartTimes()
    start = times._last
    moments = iter([start + 1.25, start + 3.5])
    monkeypatch.setattr(time, "time", lambda: next(moments))
    times.end("group")
    times.end("weights")
    assert str(times) == "3.50 s (group 1.25, weights 2.25)"


def test_the_start_is_right_to_a_tick_of_the_clock() -> None:
    # without importing torch, which takes long
    imports = "import os, time, psutil\nfrom pathlib import Path\n"
    code = f"{imports}{inspect.getsource(_started_at)}print(_started_at())"
    before = time.time()
    started = float(subprocess.check_output([sys.executable, "-P", "-c", code]))
    tick = 1 / os.sysconf("SC_CLK_TCK") if Path("/proc").exists() else 1.0
    assert before - 2 * tick <= started <= time.time()


def test_a_trace_outlives_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = Config(device="cpu", profile=1)
    folder = make_run_folder(config)
    profiler = load(config, WorkerAssignment(1, "g", 0, 1, ""), lambda: None).profiler
    assert profiler is not None
    for _ in range(FIRST_STEP + 1):
        profiler.step()
    shutil.rmtree(folder)
    assert [path.name for path in tmp_path.rglob("*.json")] == ["trace-default-0.json"]


FIRST_REQUESTS = """
import sys
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BatchPlan, RowAdded
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.worker.persistent_batch import PersistentBatch
from penstock.services.worker.timings import IdleTimes
from tests.engine import Engine

engine, idle_times = Engine(Config(model="demo-hybrid", device="cpu", num_blocks=64)), IdleTimes()
loaded = set(sys.modules)
grammar = StructuredOutputs(regex="a*")
kinds = {}, {"presence_penalty": 1.0, "logprobs": 2}, {"structured_outputs": grammar}
for number, fields in enumerate(kinds):
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, **fields)
    engine.add(str(number), [1, 2, 3], sampling)
engine.run()
batch, slots = PersistentBatch(256, 1, 4, 256, 100), range(0, 260, 20)
rows = [RowAdded(slot, pack([1]), pack([slot]), 0) for slot in slots]
batch.apply(BatchPlan(1, 0, added=rows[:-1]))
batch.advance(pack(number for slot in slots[:-1] for number in (slot, 1)))
batch.apply(BatchPlan(1, 1, added=rows[-1:]))
batch.apply(BatchPlan(1, 2, removed=pack(slots)))
idle_times._microseconds.append(1.0)
assert idle_times.percentiles() == (1.0, 1.0)
print(sorted(set(sys.modules) - loaded))
"""


def test_no_module_is_imported_after_the_start() -> None:
    """An import takes up to 80 ms, of all streams; in a standby worker, after a death."""
    found = subprocess.check_output([sys.executable, "-c", FIRST_REQUESTS], text=True)
    assert found.strip() == "[]"
