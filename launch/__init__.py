"""The command line, the supervisor, the client and the benchmarks; and `LLM`, for programs:

from penstock.launch import LLM, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.launch.llm import LLM
    from penstock.launch.outputs import CompletionOutput, RequestOutput, SamplingParams
    from penstock.protocol.structured import StructuredOutputs

_MODULES = {
    "LLM": "penstock.launch.llm",
    "CompletionOutput": "penstock.launch.outputs",
    "RequestOutput": "penstock.launch.outputs",
    "SamplingParams": "penstock.launch.outputs",
    "StructuredOutputs": "penstock.protocol.structured",
}
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    """Imported when it is first asked for: `launch` itself starts fast."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
