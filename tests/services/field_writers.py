"""The code that writes the fields of an object, and the code that its docstring names."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

MUTATORS = {"append", "extend", "clear", "pop", "popleft", "insert", "remove", "add", "update"}


def stated_writers(documented: type) -> dict[str, set[str]]:
    """Class or `module.function` → fields, as the docstring says."""
    found = re.findall(r"- `([\w.]+)`: ([\w,\s]+?)(?=\n\s*-|\n\s*$)", str(documented.__doc__))
    return {name: set(re.split(r",\s*", " ".join(fields.split()))) for name, fields in found}


def found_writers(
    folder: Path, fields: Collection[str], *, named: str = ".*", unnamed: str = "self"
) -> dict[str, set[str]]:
    """Class or `module.function` → fields that it assigns to or changes in place.

    named, unnamed: patterns of the expressions that are such objects, and that are not.
    """
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            name = getattr(node, "name", "")
            if not isinstance(node, ast.ClassDef):
                name = f"{path.stem}.{name}"
            for target in _written(node):
                of = ast.unparse(target.value)
                is_object = re.fullmatch(named, of) and not re.fullmatch(unnamed, of)
                if target.attr in fields and is_object:
                    found.setdefault(name, set()).add(target.attr)
    return found


def _written(node: ast.AST) -> Iterator[ast.Attribute]:
    for one in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(one, ast.Assign):
            targets = [
                t for t in one.targets for t in (t.elts if isinstance(t, ast.Tuple) else [t])
            ]
        elif isinstance(one, ast.AugAssign | ast.AnnAssign):
            targets = [one.target]
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
            targets = [one.func.value] if one.func.attr in MUTATORS else []
        for target in targets:
            field = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(field, ast.Attribute):
                yield field
