"""The pages of the documentation and their blocks of code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```', re.S | re.M)


class Block(NamedTuple):
    """A block of code."""

    page: str
    """its path in the repository"""
    line: int
    language: str
    needs: str
    """what a test lacks to run it; empty: nothing"""
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks of all pages in these languages."""
    for path in PAGES:
        text = path.read_text()
        for match in CODE.finditer(text):
            language, needs, code = match.groups(default="")
            if language in languages:
                line = text[: match.start()].count("\n") + 1
                yield Block(str(path.relative_to(ROOT)), line, language, needs, code)


def prose() -> Iterator[tuple[str, str]]:
    """Yield each page's path and its text without blocks of code."""
    for path in PAGES:
        yield str(path.relative_to(ROOT)), CODE.sub("", path.read_text())
