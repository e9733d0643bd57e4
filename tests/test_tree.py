"""Rules for the repository as a whole."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "launch", "models", "protocol", "services")


def test_pyproject_names_every_folder() -> None:
    """A sub-package that is not listed vanishes from the wheel without a word."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(ROOT) for top in PACKAGES for p in (ROOT / top).rglob("*.py")}
    names = {f"penstock.{'.'.join(folder.parts)}": str(folder) for folder in folders}
    names["penstock"] = str(names.pop("penstock.launch.api"))
    assert set(setuptools["packages"]) == set(names)
    assert setuptools["package-dir"] == names


def test_data_files_are_in_the_wheel() -> None:
    """Every file of the packages that is not Python is package data; the same fault otherwise."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / setuptools["package-dir"][package]).glob(pattern)
    }
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    )
    data = {ROOT / one for one in listed.stdout.split() if not one.endswith(".py")}
    assert data
    assert {one for one in data if one.exists()} == packaged


def test_init_files_hold_a_docstring_alone() -> None:
    """Except the one of `penstock` itself."""
    for path in (path for top in PACKAGES for path in (ROOT / top).rglob("__init__.py")):
        (docstring, *code) = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), path
        assert not code or path == ROOT / "launch" / "api" / "__init__.py", path


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "penstock.launch.commands.cli",
        "penstock.services.detokenizer.process",
        "penstock.services.gateway.process",
        "penstock.services.scheduler.process",
        "penstock.services.http.process",
        "penstock.services.tokenizer.process",
    ],
)
def test_starts_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
