"""Programmatic dependent launch: a kernel starts while the previous kernel still runs.

Its first instructions (addresses, reads of weights) then overlap with the end of that kernel.
Results of earlier kernels may be read only after `wait`, when all earlier kernels have ended. Every
program must call `wait`, even an idle program. (CUDA programming guide, "Programmatic Dependent
Launch"; compute capability 9.0 and newer.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.device import this_device

_SUPPORTED = not triton.knobs.runtime.interpret and this_device().has_pdl
# keyword arguments of every launch
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED else {}
PDL = tl.constexpr(_SUPPORTED)

LINE = tl.constexpr(128)  # bytes of an L2 prefetch


@triton.jit
def launch_dependents():
    """Let the next kernel start once every program of this kernel has called this function."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait():
    """Wait for the results of all earlier kernels."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(addresses):
    """Prefetch the cache lines at the addresses into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_rows(weight, rows, begin, end, K, COUNT: tl.constexpr):
    """Prefetch `COUNT` elements of each row into the L2, starting at `begin`."""
    if PDL:
        PER_LINE: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = (COUNT + PER_LINE - 1) // PER_LINE
        k = tl.minimum(begin + tl.arange(0, LINES) * PER_LINE, end - 1)
        prefetch(weight + rows[:, None] * K + k[None, :])
