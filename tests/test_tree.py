"""Rules for the repository as a whole."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "launch", "models", "protocol", "services")
SOURCES = ROOT / "src" / "penstock"


def test_every_folder_is_in_the_wheel() -> None:
    """A folder without `__init__.py`, or without its link, vanishes from the wheel."""
    links = {path.name: path.resolve() for path in SOURCES.iterdir() if path.is_symlink()}
    api = {name: ROOT / "launch" / "api" / name for name in ("__init__.py", "py.typed")}
    assert links == {name: ROOT / name for name in PACKAGES} | api
    assert {path.name for path in SOURCES.iterdir()} - {"__pycache__"} == links.keys()
    folders = {path.parent for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    assert folders
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_data_files_are_in_the_wheel() -> None:
    """Every file of the packages that is not Python is package data; the same fault otherwise."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path.resolve()
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / "src" / package.replace(".", "/")).glob(pattern)
    }
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    data = {(ROOT / path).resolve() for path in listed.stdout.split() if not path.endswith(".py")}
    assert data
    assert {path for path in data if path.exists()} == packaged


def test_imports_next_to_the_checkout(tmp_path: Path) -> None:
    """A folder `penstock` in the working folder, such as a clone, does not hide the package."""
    (tmp_path / "penstock").mkdir()
    code = "import penstock; from penstock import LLM; print(penstock.__file__)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).samefile(SOURCES / "__init__.py")  # no copy that grows old


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
