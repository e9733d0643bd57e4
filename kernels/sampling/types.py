"""Sampling parameters on the device."""

from typing import NamedTuple

from torch import Tensor


class SamplingTensors(NamedTuple):
    """Sampling parameters and last tokens by slot, each [num_slots]."""

    seeds: Tensor
    """int64"""
    temperature: Tensor
    """float32; 0: greedy"""
    top_k: Tensor
    """int32; 0 or less: all tokens"""
    top_p: Tensor
    """float32; 1: all tokens"""
    min_p: Tensor
    """float32; 0: all tokens"""
    last_token: Tensor
    """int64: `sample` writes the new token here"""
