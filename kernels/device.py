"""Properties of the GPU by which launches are chosen: shared memory, SMs and instructions."""

import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple, TypeVar

import torch

# environment variable that describes a smaller GPU to simulate, such as `sm_89,shared=99,sms=84`
SIMULATED_GPU = "PENSTOCK_SIMULATED_GPU"
T = TypeVar("T")


class Device(NamedTuple):
    """A GPU; the default is an H200, for which the launches were measured."""

    capability: tuple[int, int] = (9, 0)
    shared_bytes: int = 227 << 10  # maximum bytes of shared memory of a block
    num_sms: int = 132
    name: str = ""  # name reported by the driver; empty for a simulated GPU, or without a GPU
    # memory limit of a simulated GPU; None: the limit of the real GPU
    memory_bytes: int | None = None

    @property
    def has_pdl(self) -> bool:
        """True if kernels may start before the previous kernel has ended."""
        return self.capability >= (9, 0)

    @property
    def is_asynchronous(self) -> bool:
        """True if tensor cores compute while a program goes on, with operands in shared memory."""
        return self.capability in ((9, 0), (10, 0))

    @property
    def has_fp8(self) -> bool:
        """True if instructions convert e4m3."""
        return self.capability >= (8, 9)

    @property
    def is_measured(self) -> bool:
        """True if the measured tile sizes apply to this GPU."""
        return self.capability == (9, 0) and self.shared_bytes >= Device().shared_bytes

    def fitting(self, launches: Iterable[T], shared_bytes: Callable[[T], int]) -> T:
        """Return the first launch whose estimated shared memory fits a block.

        shared_bytes: returns the bytes of a launch, exactly for synchronous tensor cores. Others
        hold one more stage, which is counted where it may not fit. Raises ValueError if no launch
        fits.
        """
        for launch in launches:
            if shared_bytes(launch) <= self.shared_bytes:
                return launch
        raise ValueError(
            f"shared memory: got {self.shared_bytes} bytes a block, expected more for {launch}"
        )


@cache
def this_device() -> Device:
    """Return the current GPU or the simulated one; without a GPU, an H200.

    Raises ValueError for an invalid SIMULATED_GPU.
    """
    if text := os.environ.get(SIMULATED_GPU):
        return simulated(text)
    if not torch.cuda.is_available():
        return Device()
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = found.major, found.minor
    shared_bytes: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(capability, shared_bytes, found.multi_processor_count, found.name)


def simulated(text: str) -> Device:
    """Return the device that `text` describes: `sm_89,shared=99,sms=84,memory=24`.

    shared: KiB; memory: GiB, optional.
    """
    found = re.fullmatch(r"sm_(\d+)(\d),shared=(\d+),sms=(\d+)(?:,memory=(\d+))?", text)
    if not found:
        raise ValueError(
            f"{SIMULATED_GPU}: got {text!r}, expected 'sm_89,shared=99,sms=84' or with ',memory=24'"
        )
    major, minor, shared, sms = map(int, found.groups()[:4])
    memory_bytes = int(found[5]) << 30 if found[5] else None
    return Device((major, minor), shared << 10, sms, memory_bytes=memory_bytes)
