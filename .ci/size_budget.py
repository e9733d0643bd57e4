"""Keeps the code small: lines a file, lines a function, code lines of core and of extras.

Extras are what the contract of extras in pyproject.toml protects; everything else is core.
"""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
# without docstrings, comments and blank lines; an issue that adds a capability may raise the one
# that it names by what its note justifies
MAX_CORE_CODE_LINES = 29_586
MAX_EXTRAS_CODE_LINES = 10_764
CONTRACT = "core never imports an extra"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def extras() -> tuple[str, ...]:
    """Return the modules of extras, as paths without a suffix."""
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    contract = next(contract for contract in contracts if contract["name"].startswith(CONTRACT))
    modules: list[str] = contract["protected_modules"]
    return tuple(module.removeprefix("penstock.").replace(".", "/") for module in modules)


def functions_over_budget(path: Path) -> list[str]:
    """Return a sentence for each function that is too long."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


def num_code_lines(text: str) -> int:
    """Return the number of lines that are neither blank nor a comment nor a string on its own."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def main() -> int:
    """Print what is over budget; return the exit code."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    listed_paths = map(Path, listed.stdout.split())
    paths = [path for path in listed_paths if path.exists() and not path.is_symlink()]
    problems = [problem for path in paths for problem in functions_over_budget(path)]
    budgets = {"core": MAX_CORE_CODE_LINES, "extras": MAX_EXTRAS_CODE_LINES}
    files, lines, code = (dict.fromkeys(budgets, 0) for _ in range(3))
    prefixes = extras()
    for path in paths:
        text = path.read_text()
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES:
            problems.append(f"{path} has {num_lines} lines")
        if path.parts[0] not in ("tests", ".ci", "examples"):
            module = str(path.with_suffix(""))
            is_extra = any(f"{module}/".startswith(f"{prefix}/") for prefix in prefixes)
            part = "extras" if is_extra else "core"
            files[part] += 1
            lines[part] += num_lines
            code[part] += num_code_lines(text)
    for part, budget in budgets.items():
        if code[part] > budget:
            problems.append(f"{part}: {code[part]} code lines; the budget is {budget}")
        print(f"{part}: {files[part]} files, {lines[part]} lines, {code[part]} code lines")
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
