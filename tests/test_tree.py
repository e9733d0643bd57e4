"""What holds for the repository as a whole."""

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
    assert set(setuptools["packages"]) == set(names)
    assert setuptools["package-dir"] == names


@pytest.mark.parametrize(
    "module",
    [
        "penstock.launch.cli",
        "penstock.services.detokenizer",
        "penstock.services.gateway.process",
        "penstock.services.scheduler.process",
        "penstock.services.tokenizer",
    ],
)
def test_starts_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
