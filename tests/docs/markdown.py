"""Markdown of generated pages."""

from collections.abc import Iterable

GENERATED = "<!-- generated from the code by `make docs` -->"


def table(header: str, rows: Iterable[str]) -> str:
    """Return a table; header: the names of the columns, `a | b`."""
    rule = " | ".join("---" for _ in header.split(" | "))
    return "\n".join([f"| {header} |", f"| {rule} |", *(f"| {row} |" for row in rows)])


def page(title: str, *parts: str) -> str:
    """Return a generated page."""
    return "\n\n".join([GENERATED, f"# {title}", *parts]) + "\n"
