"""Programmatic dependent launch: a kernel starts while the previous kernel still runs.

Its first instructions (addresses, reads of weights) then overlap with the end of that kernel.
Results of earlier kernels may be read only after `wait`, which every program must call, even an
idle program: all earlier kernels have then ended. (CUDA programming guide, "Programmatic Dependent
Launch"; compute capability 9.0 and newer.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.device import this_device

_SUPPORTED = not triton.knobs.runtime.interpret and this_device().has_pdl
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED else {}
"""keyword arguments of every launch"""
PDL = tl.constexpr(_SUPPORTED)


@triton.jit
def launch_dependents():
    """Lets the next kernel start after every program of this kernel has called this."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait():
    """Wait for the results of all earlier kernels."""
    if PDL:
        gdc_wait()
