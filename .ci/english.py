"""Hints at English that readers stumble over, in docstrings, comments, messages and pages.

Prints the places and always succeeds, except for misspelled words: a reader judges, not a list.
`english.py FOLDER …` prints the places in some folders only. A comment `english: ok` on the last
line of a string or comment, or on a line of a page, allows a justified use.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

IGNORED_WORDS = Path(".ci/codespell.txt")
ALLOWED = "english: ok"
RULES = {"product": "D100,D101,D103,D104,D205,D400,D401,D404", "tests": "D205,D400,D401,D404"}

START = re.compile(r"\s*(What|How|Which|Whether|Who|Where|Here|Of|It|Those)\b")
"""of docstrings"""
THIRD_PERSON = re.compile(r"\s*([A-Z][a-z]*[a-rt-z]s|As|One)\b")
"""of the product's functions, whose docstrings start with a verb: `Return`, not `Returns`"""
IN_FRONT = "proxy|proxies|balancer|firewall|NAT|nginx|Service"
"""things that a server can stand behind"""  # english: ok
BANNED = {
    r"\bt(old|ells|elling)\b": "report, send, return, notify",
    r"(^|\b(?!there\b)\w+\W*) (is|are) no (?!longer|more)": "is not a …, unknown, invalid",
    r"\b(go|goes|going|went) on\b(?! to\b)": "continue, resume",
    r"\bso many\b": "N, up to N",
    rf"\bbehind\b(?! (an? |the )?(\w+ )?({IN_FRONT})\b)": "after, following, beyond",
    r"\bbut for\b": "except for, otherwise",
    r"\b(is|are|was|were|be) gone\b": "exited, disconnected, unreachable",
    r"\banew\b": "again",
    r"\bbesides?\b": "in addition to, next to, during",
}
PATTERNS = [
    (re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), better)
    for pattern, better in BANNED.items()
]
Place = tuple[str, int, str]
"""path, line, problem"""


def listed(*patterns: str) -> list[str]:
    """Return the repository's files, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [path for path in found if Path(path).exists()]


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """Yield the docstrings of the module, its classes and its functions; the last with True."""
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function or isinstance(node, ast.Module | ast.ClassDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                named = map(ast.unparse, getattr(node, "decorator_list", ()))
                yield first.value, is_function and not any("property" in name for name in named)


def texts_of_python(path: str, source: str) -> Iterator[tuple[int, int, str]]:
    """Yield first line, last line and text of each string and comment."""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.end_lineno or node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.start[0], token.string


def texts_of_page(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the lines of a page, code left out."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, number, re.sub(r"`[^`]*`", "``", line)


def banned_words(path: str) -> Iterator[Place]:
    """Yield the banned words of a file and the docstrings that start with one."""
    source = Path(path).read_text()
    lines = source.splitlines()
    is_python = path.endswith(".py")
    texts = texts_of_python(path, source) if is_python else texts_of_page(source)
    for first, last, text in texts:
        if ALLOWED in lines[last - 1]:
            continue
        for pattern, better in PATTERNS:
            for match in pattern.finditer(text):
                is_block = "\n" in text and last > first
                line = first + text.count("\n", 0, match.start()) if is_block else first
                yield path, line, f'"{" ".join(match[0].split())}": {better}'
    for node, is_function in docstrings(ast.parse(source)) if is_python else ():
        is_verb = is_function and not path.startswith("tests/")
        text = node.value if isinstance(node.value, str) else ""
        match = START.match(text) or (is_verb and THIRD_PERSON.match(text))
        if match:
            yield path, node.lineno, f'a docstring starts with "{match[1]}"'


def program(name: str) -> str:
    """Return the path of a program of the running environment."""
    return str(Path(sys.executable).with_name(name))


def docstring_rules(paths: list[str]) -> Iterator[Place]:
    """Yield the docstrings that ruff's rules reject."""
    tests = [path for path in paths if path.startswith("tests/")]
    product = [path for path in paths if not path.startswith("tests/")]
    for rules, some in ((RULES["product"], product), (RULES["tests"], tests)):
        command = [
            program("ruff"),
            "check",
            "--select",
            rules,
            "--output-format",
            "json",
            "--",
            *some,
        ]
        if some:
            found = subprocess.run(command, check=False, capture_output=True, text=True).stdout
            for problem in json.loads(found):
                path = str(Path(problem["filename"]).relative_to(Path.cwd()))
                yield path, problem["location"]["row"], f"{problem['code']} {problem['message']}"


def misspelled(paths: list[str]) -> Iterator[Place]:
    """Yield the words that codespell doesn't know."""
    command = [program("codespell"), "--ignore-words", str(IGNORED_WORDS), *paths]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    for found_line in found.stdout.splitlines():
        path, line, words = found_line.split(":", 2)
        yield path.removeprefix("./"), int(line), f"spelling: {words.strip()}"


def main(folders: list[str]) -> int:
    """Print places as PATH:LINE: PROBLEM; return 1 if a word is misspelled."""
    python, pages = listed("*.py"), listed("*.md")
    others = listed("Makefile", "*.toml", "*.yaml", "*.sh", "*.js", "*.html")
    spelling = list(misspelled([*python, *pages, *others]))
    places = [place for path in python + pages for place in banned_words(path)]
    places += [*docstring_rules(python), *spelling]
    inside = tuple("" if folder == "." else f"{folder.rstrip('/')}/" for folder in folders or ["."])
    for path, line, problem in sorted(places):
        if f"{path}/".startswith(inside):
            print(f"{path}:{line}: {problem}")
    return 1 if spelling else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
