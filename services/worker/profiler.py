"""A torch profiler trace of some steps, for chrome://tracing or https://ui.perfetto.dev."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)
FIRST_STEP = 100
"""where the trace begins: what is done once is done by then"""


def step_profiler(num_steps: int, path: Path) -> profile:
    """Started; its `step` is to be called before every step. Writes `path` when it has enough."""

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))
        log.info("wrote the trace of %d steps to %s", num_steps, path)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=FIRST_STEP - 2, warmup=2, active=num_steps, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
