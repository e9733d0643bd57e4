"""Tools that a server may run itself, such as web search: they are left out, and named."""

import logging
import re
from collections.abc import Iterable

from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import invalid

_log = logging.getLogger("http")
# a date or a variant may follow: `web_search_20250305`, `computer_use_preview`
_TYPE = re.compile(
    "(advisor|apply_patch|bash|browser_toolset|code_execution|code_interpreter|computer"
    "|file_search|image_generation|local_shell|mcp|memory|programmatic_tool_calling|shell"
    "|text_editor|tool_search|web_fetch|web_search)(_[a-z0-9_]*)?"
)
_HEADER = b"x-ignored-tools"
_logged: set[str] = set()


def is_declined(kind: str | None) -> bool:
    """Return whether a tool of this type, OpenAI's or Anthropic's, is left out."""
    return kind is not None and _TYPE.fullmatch(kind) is not None


def report_declined(kinds: Iterable[str]) -> None:
    """Name tools that were left out: in the response's header, and once in the log."""
    names = sorted({found[1] for kind in kinds if (found := _TYPE.fullmatch(kind))})
    sender = caller.get(None)
    if names and sender and sender.headers is not None:
        sender.headers[_HEADER] = ", ".join(names).encode()
    for name in names:
        if name not in _logged:
            _logged.add(name)
            _log.warning("requests have tools of type %s: left out, as Penstock runs none", name)


def refuse_forced(field: str, got: str, kinds: Iterable[str]) -> None:
    """Raise ApiError where a call is forced and its tools, of types `kinds`, are left out."""
    if which := ", ".join(sorted(set(kinds))):
        problem = f"got {got!r:.200}, expected 'auto' or 'none'"
        raise invalid(field, f"{problem}: Penstock does not run tools of type {which:.200}")
