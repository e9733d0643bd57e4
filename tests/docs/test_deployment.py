"""Checks of the deployment files of examples/ without Kubernetes and Slurm."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.docs.pages import ROOT

KUBERAY = list(yaml.safe_load_all((ROOT / "examples" / "kuberay.yaml").read_text()))
SLURM = ROOT / "examples" / "slurm.sh"


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (one for one in KUBERAY if one["kind"] == kind)
    return dict(found)


def pods() -> list[dict[str, Any]]:
    spec = of_kind("RayCluster")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [one["template"] for one in groups]


def test_the_service_and_the_job_find_the_cluster() -> None:
    cluster = of_kind("RayCluster")["metadata"]["name"]
    assert of_kind("RayJob")["spec"]["clusterSelector"] == {"ray.io/cluster": cluster}
    head, _ = pods()
    assert of_kind("Service")["spec"]["selector"] == head["metadata"]["labels"]


def test_every_mount_has_its_volume() -> None:
    for pod in pods():
        volumes = {one["name"] for one in pod["spec"]["volumes"]}
        mounts = {one["name"] for c in pod["spec"]["containers"] for one in c["volumeMounts"]}
        assert mounts == volumes


def test_the_secret_has_what_the_guide_makes() -> None:
    """Each key of the secret is a file of `launch keys`, or the API key."""
    text = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    made = {Path(one).name for one in re.findall(r"--from-file=(\S+)", text)} | {"api-key"}
    (container,) = pods()[0]["spec"]["containers"]
    secrets = [
        one["valueFrom"]["secretKeyRef"]["key"]
        for one in container["env"]
        if "secretKeyRef" in one["valueFrom"]
    ]
    (keys,) = (one["secret"] for one in pods()[0]["spec"]["volumes"] if "secret" in one)
    assert made == {*secrets, *(one["key"] for one in keys["items"])}
    folder = next(one for one in container["volumeMounts"] if one["name"] == "keys")["mountPath"]
    assert f"--curve-keys {folder}" in of_kind("RayJob")["spec"]["entrypoint"]


def test_the_service_has_the_ports_of_the_pipeline() -> None:
    entrypoint = of_kind("RayJob")["spec"]["entrypoint"]
    ports = {one["name"]: one["port"] for one in of_kind("Service")["spec"]["ports"]}
    assert f"--endpoint tcp://0.0.0.0:{ports['zeromq']}" in entrypoint
    assert ports["http"] == 8000


def test_the_workers_have_the_gpus_of_the_command() -> None:
    spec = of_kind("RayCluster")["spec"]["workerGroupSpecs"][0]
    (container,) = spec["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * spec["replicas"]
    tp, dp = (
        int(re.search(rf"--{name} (\d+)", of_kind("RayJob")["spec"]["entrypoint"])[1])  # type: ignore[index]
        for name in ("tp", "dp")
    )
    assert gpus == tp * dp


def test_slurm_launches_and_stops(tmp_path: Path) -> None:
    """With stand-ins for srun, ray and launch: the script starts `launch all`, and SIGTERM ends it.

    The stand-in of `launch all` waits as the real one does, until `launch stop` is called.
    """
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    os.mkfifo(tmp_path / "stop")
    os.mkfifo(tmp_path / "started")
    activate = tmp_path / "penstock" / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    programs = {
        "srun": 'shift; exec "$@"',
        "ray": """[ "$1" = symmetric-run ] || exit 0
            while [ "$1" != -- ]; do shift; done
            shift; "$@\"""",
        "launch": f"""case $1 in
            all) echo > {tmp_path}/started; read -r < {tmp_path}/stop ;;
            stop) echo > {tmp_path}/stop ;;
        esac""",
    }
    for name, text in programs.items():
        program = folder / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> {log}\n{text}\n')
        program.chmod(0o755)
    slurm = {
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_ID": "17",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_GPUS_ON_NODE": "8",
        "HOME": str(tmp_path),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    with subprocess.Popen(
        ["bash", str(SLURM), "/models/Qwen3-32B"], env=os.environ | slurm, start_new_session=True
    ) as script:
        try:
            (tmp_path / "started").read_text()
            script.send_signal(signal.SIGTERM)
            assert script.wait(30) == 0
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    lines = log.read_text().splitlines()
    (started,) = (one for one in lines if one.startswith("launch all"))
    assert "--tp 8 --dp 4 --model /models/Qwen3-32B" in started
    assert "launch stop" in lines
