"""The list of extras of this package: back ends in place of portable kernels.

Only this file imports them, when a process chooses them.
"""

import logging

from penstock.kernels.back_ends import CHOSEN, CompiledStep, Deterministic, RankMemory

log = logging.getLogger(__name__)
INSTALL = "`pip install 'penstock-llm[cpu]'` installs the compiler"


def use_deterministic_kernels(enabled: bool) -> None:
    """Choose the GPU kernels whose rows do not depend on other rows."""
    CHOSEN.deterministic = None
    if enabled:
        from penstock.kernels.deterministic import triton_attention, triton_linear

        CHOSEN.deterministic = Deterministic(
            triton_linear.multiply,
            triton_attention.FixedSplitDecode,
            triton_attention.fixed_split_prefill,
        )


def use_rank_memory() -> None:
    """Let ranks on CPUs of one machine share memory, if code can be compiled."""
    try:
        from penstock.kernels.cpu.shared_memory import SharedMemory, shared_bytes
    except (ImportError, OSError, AttributeError):  # without llvmlite, or with a broken one
        return
    CHOSEN.rank_memory = RankMemory(shared_bytes, SharedMemory)


def use_compiled_step() -> None:
    """Compile the CPU functions around the layers of a step, if this is possible."""
    try:
        from penstock.kernels.cpu.compiled_step import compiled_step

        functions = compiled_step()
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("steps are prepared in numpy, and tokens sampled in torch: %s", error)
        return
    CHOSEN.compiled_step = CompiledStep(functions.apply_plan, functions.sample)
