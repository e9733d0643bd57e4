"""Penstock's Python API: offline inference and clients of a running pipeline.

from penstock import LLM, AsyncClient, Client, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.launch.offline.beam_search import BeamSearchParams as BeamSearchParams
    from penstock.launch.offline.llm import LLM as LLM
    from penstock.launch.offline.outputs import CompletionOutput as CompletionOutput
    from penstock.launch.offline.outputs import RequestOutput as RequestOutput
    from penstock.launch.pipeline.errors import LaunchError as LaunchError
    from penstock.protocol.client.async_client import AsyncClient as AsyncClient
    from penstock.protocol.client.client import Client as Client
    from penstock.protocol.client.session import ClientError as ClientError
    from penstock.protocol.client.session import NoAnswer as NoAnswer
    from penstock.protocol.client.session import RequestError as RequestError
    from penstock.protocol.messages.sampling import SamplingParams as SamplingParams
    from penstock.protocol.messages.structured import StructuredOutputs as StructuredOutputs

_MODULES = {
    "LLM": "launch.offline.llm",
    "AsyncClient": "protocol.client.async_client",
    "BeamSearchParams": "launch.offline.beam_search",
    "Client": "protocol.client.client",
    "ClientError": "protocol.client.session",
    "CompletionOutput": "launch.offline.outputs",
    "LaunchError": "launch.pipeline.errors",
    "NoAnswer": "protocol.client.session",
    "RequestError": "protocol.client.session",
    "RequestOutput": "launch.offline.outputs",
    "SamplingParams": "protocol.messages.sampling",
    "StructuredOutputs": "protocol.messages.structured",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use, since processes of a pipeline need none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.{_MODULES[name]}"), name)
