"""Checks the links of the pages at the top; Zensical checks those within docs/."""

import re
import sys
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def main() -> int:
    """Print each link to a file that does not exist; return the exit code."""
    problems = [
        f"{page}: {target} does not exist"
        for page in sorted(Path().glob("*.md"))
        for target in LINK.findall(page.read_text())
        if "://" not in target and not Path(target).exists()
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
