"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Its first instructions (addresses, reads of weights) then overlap with the end of that kernel. What
earlier kernels write may be read behind `wait` only, and every program must call it, also one that
has nothing to do: a kernel has then seen the end of all kernels before it. (CUDA programming
guide, "Programmatic Dependent Launch"; compute capability 9.0 and newer.)
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_SUPPORTED = (
    not triton.knobs.runtime.interpret
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
)
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED else {}
"""keyword arguments of every launch"""
PDL = tl.constexpr(_SUPPORTED)


@triton.jit
def launch_dependents():
    """The next kernel may start as soon as every program of this one has come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait():
    """Behind this, the results of all kernels before are there."""
    if PDL:
        gdc_wait()
