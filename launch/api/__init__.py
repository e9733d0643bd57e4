"""Penstock's Python API: offline inference and clients of a running pipeline.

from penstock import LLM, AsyncClient, Client, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.launch.offline.beam_search import BeamSearchParams
    from penstock.launch.offline.llm import LLM
    from penstock.launch.offline.outputs import CompletionOutput, RequestOutput
    from penstock.launch.pipeline.errors import LaunchError
    from penstock.protocol.client.async_client import AsyncClient
    from penstock.protocol.client.client import Client
    from penstock.protocol.client.session import ClientError, NoAnswer, RequestError
    from penstock.protocol.messages.sampling import SamplingParams
    from penstock.protocol.messages.structured import StructuredOutputs

_NAMES = {
    "penstock.launch.offline.beam_search": ["BeamSearchParams"],
    "penstock.launch.offline.llm": ["LLM"],
    "penstock.launch.offline.outputs": ["CompletionOutput", "RequestOutput"],
    "penstock.launch.pipeline.errors": ["LaunchError"],
    "penstock.protocol.client.async_client": ["AsyncClient"],
    "penstock.protocol.client.client": ["Client"],
    "penstock.protocol.client.session": ["ClientError", "NoAnswer", "RequestError"],
    "penstock.protocol.messages.sampling": ["SamplingParams"],
    "penstock.protocol.messages.structured": ["StructuredOutputs"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "LLM",
    "AsyncClient",
    "BeamSearchParams",
    "Client",
    "ClientError",
    "CompletionOutput",
    "LaunchError",
    "NoAnswer",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use, since processes of a pipeline need none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
