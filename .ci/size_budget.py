"""Keeps the code small: lines a file, lines a function, lines in all."""

import ast
import subprocess
import sys
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_TOTAL_LINES = 50950
"""of the product, without tests"""


def functions_over_budget(path: Path) -> list[str]:
    """Each function that is too long, as a sentence."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def main() -> int:
    """Print what is over budget; returns the exit code."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    listed_paths = map(Path, listed.stdout.split())
    paths = [path for path in listed_paths if path.exists() and not path.is_symlink()]
    lines = {path: len(path.read_text().splitlines()) for path in paths}
    problems = [f"{path} has {n} lines" for path, n in lines.items() if n > MAX_FILE_LINES]
    problems += [problem for path in paths for problem in functions_over_budget(path)]
    product = {p: n for p, n in lines.items() if p.parts[0] not in ("tests", ".ci", "examples")}
    total = sum(product.values())
    if total > MAX_TOTAL_LINES:
        problems.append(f"the product has {total} lines; the budget is {MAX_TOTAL_LINES}")
    median = sorted(product.values())[len(product) // 2]
    print(*problems, f"{len(product)} files, {total} lines, median {median}", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
