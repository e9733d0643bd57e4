"""GPU memory that lasts as long as its file descriptor, by the driver's virtual memory API.

Memory of `cuMemCreate` that is exported as a POSIX descriptor outlives its process and CUDA
context. Another process maps the memory within a millisecond.
"""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

_PINNED, _POSIX_DESCRIPTOR, _DEVICE, _READ_WRITE = 1, 1, 1, 3
_U64 = ctypes.c_uint64


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """Return new uninitialized memory, uint8 [num_bytes], and its descriptor. Raises OSError."""
    properties = _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_DEVICE, device.index))
    handle, descriptor = _U64(), ctypes.c_int(-1)
    torch.cuda.synchronize(device)  # makes the device's context current
    size = _padded(num_bytes, properties)
    _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), _U64(0))
    try:
        _call(
            *("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle),
            *(_POSIX_DESCRIPTOR, _U64(0)),
        )
        return _mapped(handle, num_bytes, size, device), descriptor.value
    except OSError:
        _call("cuMemRelease", handle)
        if descriptor.value >= 0:
            os.close(descriptor.value)
        raise


def map_memory(descriptor: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return the memory of a descriptor as uint8 [num_bytes]. Raises OSError."""
    handle = _U64()
    torch.cuda.synchronize(device)
    address = ctypes.c_void_p(descriptor)
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), address, _POSIX_DESCRIPTOR)
    location = _Location(_DEVICE, device.index)
    size = _padded(num_bytes, _Properties(_PINNED, _POSIX_DESCRIPTOR, location))
    return _mapped(handle, num_bytes, size, device)


def _padded(num_bytes: int, properties: _Properties) -> ctypes.c_size_t:
    """Return the size, rounded up to whole pages of the device."""
    page = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), 0)
    return ctypes.c_size_t(-(-num_bytes // page.value) * page.value)


def _mapped(handle: Any, num_bytes: int, size: ctypes.c_size_t, device: torch.device) -> Tensor:
    """Map memory until the process exits."""
    pointer, none = _U64(), _U64(0)
    _call("cuMemAddressReserve", ctypes.byref(pointer), size, ctypes.c_size_t(0), none, none)
    _call("cuMemMap", pointer, size, ctypes.c_size_t(0), handle, none)
    access = _Access(_Location(_DEVICE, device.index), _READ_WRITE)
    _call("cuMemSetAccess", pointer, size, ctypes.byref(access), ctypes.c_size_t(1))
    _call("cuMemRelease", handle)  # the mapping and the descriptor hold the memory
    return torch.as_tensor(_Bytes(pointer.value, num_bytes), device=device)


class _Bytes:
    """The CUDA array interface (Numba's, version 2) of mapped memory, for `torch.as_tensor`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, name):
        raise OSError(f"the driver lacks {name}")
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'?').decode()} ({code})")
