"""Resolve constraints.txt for every extra and every Python, from PyPI's metadata alone.

pip's configuration and wheels on the disk can hide that no other machine can install the pins.
"""

import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")  # of each the first release, such as 3.11.0
PLATFORM = "x86_64-manylinux_2_31"  # llguidance has no wheel for an older glibc
SOURCE_EXTRA = "flash-attn"  # without wheels: uv reads the metadata in its archive of sources
UV = str(Path(sys.executable).with_name("uv"))


def resolve(python: str, extras: tuple[str, ...]) -> str:
    """Return what is wrong with the pins for a Python and some extras, or nothing."""
    command = [
        *(UV, "pip", "compile", "--quiet", "--no-config", "--native-tls"),
        *("--python-version", python, "--python-platform", PLATFORM),
        *("--constraint", "constraints.txt", "--output-file", os.devnull, "pyproject.toml"),
        *(f"--extra={extra}" for extra in extras),
    ]
    if SOURCE_EXTRA not in extras:
        command.append("--no-build")
    # such as UV_FIND_LINKS, which would add wheels that PyPI lacks
    environment = {name: text for name, text in os.environ.items() if not name.startswith("UV_")}
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if run.returncode == 0:
        return ""
    if "Failed to fetch" in run.stderr:
        return f"constraints.txt was not checked: PyPI can't be reached\n{run.stderr}"
    return f"constraints.txt with {', '.join(extras)} on Python {python}:\n{run.stderr}"


def main() -> int:
    """Print the first resolution that fails, if any; return the exit code."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    # pins that hold for several extras together hold for each of them alone
    wheels = tuple(extra for extra in project["optional-dependencies"] if extra != SOURCE_EXTRA)
    with ThreadPoolExecutor() as threads:
        pythons, extras = zip(*product(PYTHONS, (wheels, (SOURCE_EXTRA,))), strict=True)
        problems = list(filter(None, threads.map(resolve, pythons, extras)))
    listed = ", ".join((*wheels, SOURCE_EXTRA))
    print(problems[0] if problems else f"constraints.txt resolves on PyPI with {listed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
