"""`launch collect-env`: what it shows, and what it hides."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launch.extras import collect_env as module
from penstock.protocol.config import DISTRIBUTION

NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
    *query-gpu*) printf 'index, name\\n0, NVIDIA L4\\n1, NVIDIA L4\\n' ;;
    topo*) echo GPU0 NV18 ;;
    *) echo '| CUDA Version: 13.0 |' ;;
esac
"""


def collect(environment: dict[str, str] | None = None) -> str:
    code = (
        "import sys; sys.argv = ['launch', 'collect-env']\n"
        "from penstock.launch.commands.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'triton', 'ray'} & set(sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=os.environ | (environment or {}), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_secrets_are_hidden() -> None:
    secrets = {"PENSTOCK_API_KEY": "hide-a", "HF_TOKEN": "hide-b", "AWS_SECRET_KEY": "hide-c"}
    others = {"https_proxy": "http://me:hide-d@proxy:3128", "PENSTOCK_TP": "2"}
    shown = collect(secrets | others)
    assert "hide-" not in shown
    assert "PENSTOCK_API_KEY:      (hidden)\n" in shown
    assert "https_proxy:           http://(hidden)@proxy:3128\n" in shown
    assert "PENSTOCK_TP:           2\n" in shown


URLS = {
    "https://h/v1?api-key=hide": "https://h/v1?(hidden)",
    "https://h/?a=hide&b=hide,x https://i/?c=hide#d": "https://h/?(hidden) https://i/?(hidden)",
    "u:hide@h:8": "(hidden)@h:8",
    "u:hi@hide@h:8": "(hidden)@h:8",
    "http://u:hi/hide@h:8": "http://(hidden)@h:8",
    "u:hi/hide@h:8": "(hidden)@h:8",
    "u:hide?hide@h:8": "(hidden)",
    "https://h/?key=hide@hide": "https://(hidden)",
    "https://u:hide?hide@h:8": "https://(hidden)",
    "https://u:hide@h/v1?key=hide": "https://(hidden)@h/v1?(hidden)",
    "https://me:hide@a/b https://hide@c": "https://(hidden)@a/b https://(hidden)@c",
    "/opt/a@b/c:/opt/d": "/opt/a@b/c:/opt/d",
}


def test_parts_of_urls_are_hidden() -> None:
    names = {f"PIP_{number:02}": url for number, url in enumerate(URLS)}
    lines = [line.split(":", 1) for line in collect(names).splitlines() if ":" in line]
    shown = {name.strip(): value.strip() for name, value in lines}
    assert {url: shown[name] for name, url in names.items()} == URLS


def test_facts_are_there() -> None:
    lines = collect().splitlines()
    for name in ("python", "penstock", "torch", "pyzmq", "CPU", "memory", "cgroup"):
        (line,) = [line for line in lines if line.startswith(f"  {name}:")]
        assert line.partition(":")[2].strip() not in ("", "not installed")
    if shutil.which("git") and (Path(__file__).parents[3] / ".git").exists():
        assert any(line.startswith("  commit: ") for line in lines)


def test_gpus_are_those_of_the_driver(tmp_path: Path) -> None:
    assert "nvidia-smi:            not found\n" in collect({"PATH": str(tmp_path)})
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    shown = collect({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    for text in ("1, NVIDIA L4\n", "CUDA of the driver:    13.0\n", "GPU0 NV18\n"):
        assert text in shown


def test_the_distribution_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def requires(name: str) -> list[str]:
        asked.append(name)
        return []

    monkeypatch.setattr(module.metadata, "requires", requires)
    assert dict(module._versions())["penstock"] != "not installed"
    assert asked == [DISTRIBUTION]
