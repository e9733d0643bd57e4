"""The docstring of `Sequence` names the writers of its fields, and no other code writes them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.services.scheduler import sequence as sequence_module
from penstock.services.scheduler.sequence import Sequence

FOLDER = Path(str(sequence_module.__file__)).parent
OTHERS = ("self", "status", "outbox", "extras")
"""names of other objects, which have fields of the same names"""
MUTATORS = {"append", "extend", "clear", "pop", "insert", "remove"}


def stated_writers() -> dict[str, set[str]]:
    """Class, or module of functions → fields, as the docstring says."""
    found = re.findall(r"- `(\w+)`: ([\w,\s]+?)(?=\n\s*-|\n\s*$)", str(Sequence.__doc__))
    return {name: set(re.split(r",\s*", " ".join(fields.split()))) for name, fields in found}


def written_fields(node: ast.AST) -> Iterator[str]:
    """Return the fields of sequences that code assigns to or changes in place."""
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
            is_field = isinstance(target, ast.Attribute) and target.attr in Sequence.__slots__
            if is_field and ast.unparse(target.value) not in OTHERS:
                yield target.attr


def test_the_docstring_names_every_writer() -> None:
    found: dict[str, set[str]] = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            name = node.name if isinstance(node, ast.ClassDef) else path.stem
            if fields := set(written_fields(node)):
                found.setdefault(path.stem if name == "Poison" else name, set()).update(fields)
    assert found == stated_writers()
