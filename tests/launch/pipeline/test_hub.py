"""Names of models on a hub, resolved by `huggingface_hub` against a server of ours."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from huggingface_hub import _tree_cache, constants

from penstock.launch.pipeline import hub_download
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import DOWNLOADER, HubModel, hub_model, resolve
from penstock.launch.pipeline.hub_download import download
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import HYBRID_DEMO, Config
from tests.launch.pipeline.fake_hub import COMMIT, TOKEN, FakeHub

pytestmark = pytest.mark.slow

DEMO = Config().model_folder
NAME = "Qwen/Qwen3-demo"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a hub with the demo model under three names, and an empty cache."""
    published = tmp_path / "published"
    shutil.copytree(DEMO, published)
    (published / "README.md").write_text("not needed")
    quantized = tmp_path / "quantized"
    shutil.copytree(DEMO, quantized)
    facts = json.loads((DEMO / "config.json").read_text())
    facts["quantization_config"] = {"group_size": 64, "bits": 4}
    (quantized / "config.json").write_text(json.dumps(facts))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "Qwen3-8B-Q4_K_M.gguf").write_bytes(b"GGUF")
    folders = {
        "Qwen/Qwen3-8B-GGUF": gguf,
        NAME: published,
        "Qwen/Qwen3-demo-4bit": quantized,
        "Qwen/gated": published,
    }
    with FakeHub(folders) as server:
        server.gated.add("Qwen/gated")
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        use_endpoint(monkeypatch, server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "cache" / "token"))
        yield server


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set the address of the hub, which is read when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    url = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)


def get(name: str, revision: str = "", *, weights: bool = True) -> Path:
    """Download in this process, which spares starting another one."""
    return download(name, revision, weights=weights)


def refusal(name: str, revision: str = "") -> str:
    """Return the sentence that refuses a name."""
    with pytest.raises(ModelError) as error:
        get(name, revision)
    return str(error.value)


def test_only_needed_files_are_downloaded_and_once(hub: FakeHub) -> None:
    folder = get(NAME)
    assert folder.name == COMMIT
    needed = {path.name for path in DEMO.iterdir()}
    assert {path.name for path in folder.iterdir()} == needed
    for name in needed:
        assert (folder / name).read_bytes() == (DEMO / name).read_bytes()
    hub.asked.clear()
    assert get(NAME, "v1") == get(NAME, COMMIT) == folder
    assert not [line for line in hub.asked if "/resolve/" in line]


@pytest.mark.usefixtures("hub")
def test_the_configuration_alone() -> None:
    folder = get(NAME, weights=False)
    assert (folder / "config.json").exists()
    assert not list(folder.glob("*.safetensors"))


def test_offline_the_cache_serves_what_it_has_whole(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache" in refusal(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    get(NAME, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "no complete copy" in refusal(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = get(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert get(NAME) == folder
    shutil.rmtree(folder.parents[1] / "trees")  # as older versions left it
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    (folder / "model.safetensors").unlink()
    assert "lacks model.safetensors; unset HF_HUB_OFFLINE" in refusal(NAME)
    assert not hub.asked


def test_without_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    sentence = refusal(NAME)
    assert f"--model: got '{NAME}': http://127.0.0.1:9 can't be reached" in sentence
    assert "check the network, or give the folder of a checkpoint" in sentence
    use_endpoint(monkeypatch, hub.endpoint)
    folder = get(NAME)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert get(NAME) == folder


def test_names_and_revisions_that_are_not_there(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-demon").mkdir(parents=True)
    sentence = refusal("Qwen/Qwen3-demom")
    assert "got 'Qwen/Qwen3-demom', expected an existing folder or a repository of" in sentence
    assert "did you mean the folder 'Qwen/Qwen3-demon'?" in sentence
    assert refusal("Qwen/a..b").startswith("--model: got 'Qwen/a..b', expected an existing")
    (tmp_path / "Qwen" / "loop").symlink_to("loop")
    assert "is a symbolic link that leads nowhere" in refusal(str(tmp_path / "Qwen" / "loop"))
    assert refusal(NAME, "v2") == (
        f"--revision: got 'v2', expected a branch, tag or commit of {hub.endpoint}/{NAME}"
    )


@pytest.mark.usefixtures("hub")
def test_gated_names_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a gated repository, and it needs a token; accept its terms at" in refusal("Qwen/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "the token's account has no access" in refusal("Qwen/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (get("Qwen/gated") / "model.safetensors").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses the token; correct or unset HF_TOKEN" in refusal("Qwen/nothing")


def test_what_is_not_served_is_refused_before_its_weights_are_downloaded(hub: FakeHub) -> None:
    sentence = "got 4-bit MLX weights, expected 16 bits, FP8, AWQ, GPTQ, compressed-tensors or mod"
    assert sentence in refusal("Qwen/Qwen3-demo-4bit")
    sentence = "Qwen/Qwen3-8B-GGUF: got GGUF files, expected config.json and safetensors; give the"
    assert refusal("Qwen/Qwen3-8B-GGUF").startswith(sentence)
    assert not [line for line in hub.asked if ".safetensors" in line]


def test_a_download_that_breaks_is_continued(hub: FakeHub) -> None:
    """By `huggingface_hub`, in the same run."""
    size = (DEMO / "model.safetensors").stat().st_size
    hub.cut_after["model.safetensors"] = size // 2
    folder = get(NAME)
    assert (folder / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()
    assert sum("GET" in line and ".safetensors" in line for line in hub.asked) == 2


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError stands in for it."""

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_download, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"no space is left for the cache .*HF_HOME"):
        get(NAME)


@pytest.mark.usefixtures("hub")
def test_a_cache_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert "can't be used ([Errno 20] Not a directory" in refusal(NAME)
    assert "set HF_HOME to a folder that this user may write" in refusal(NAME)


@pytest.mark.usefixtures("hub")
def test_a_terminal_has_a_progress_bar() -> None:
    shown, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    words = [NAME, "", "weights"]
    with (
        os.fdopen(terminal, "wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-P", "-m", DOWNLOADER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        assert process.stdout is not None
        assert COMMIT in process.stdout.read().decode()
    output = bytearray()
    with os.fdopen(shown, "rb", buffering=0) as lines, contextlib.suppress(OSError):
        while True:  # a read returns a part; after the last one, reading fails
            output += lines.read(1 << 16)
    assert b"Fetching 1 files: 100%" in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_ends_with_its_command(hub: FakeHub, number: signal.Signals) -> None:
    """A transfer that never ends, and Ctrl-C, which reaches the group, or the end of `launch`."""
    hub.held.set()
    launch = [sys.executable, "-P", "-m", "penstock.launch", "all", "--model", NAME]
    with subprocess.Popen(
        launch, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert hub.is_sending.wait(60)
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert not psutil.wait_procs(children, timeout=60)[1]
    codes = {signal.SIGINT: 0, signal.SIGTERM: 0, signal.SIGKILL: -9}
    assert process.returncode == codes[number]
    assert said.startswith(f"launch: downloading {NAME} to ")
    assert "Traceback" not in said
    assert "%" not in said  # bars are for terminals


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model({"model": NAME}) == HubModel(NAME)
    (tmp_path / NAME).mkdir(parents=True)
    assert hub_model({"model": NAME}) is None
    assert resolve({"model": NAME, "tp": 2}) == {"model": str(tmp_path / NAME), "tp": 2}
    with pytest.raises(LaunchError, match="--revision: got 'v1', expected none for the folder"):
        hub_model({"model": NAME, "revision": "v1"})
    for model in ("Qwen3-demo", f"./{NAME}x", "/no/folder", "a/b/c"):
        with pytest.raises(
            LaunchError, match=r"expected an existing folder or GGUF file, or a name on the Hu"
        ):
            hub_model({"model": model})
    assert resolve({}) == {}
    assert resolve({"model": HYBRID_DEMO}) == {"model": HYBRID_DEMO}
    assert Config(model=HYBRID_DEMO).model_name == HYBRID_DEMO
    (tmp_path / HYBRID_DEMO).mkdir()
    assert resolve({"model": HYBRID_DEMO}) == {"model": str(tmp_path / HYBRID_DEMO)}
    with pytest.raises(LaunchError, match="expected none for the folder of the demo"):
        resolve({"revision": "v1"})


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_the_downloader_is_a_process(tmp_path: Path) -> None:
    options = resolve({"model": NAME, "tp": 2, "revision": "v1"})
    folder = tmp_path / "cache" / "hub" / "models--Qwen--Qwen3-demo" / "snapshots" / COMMIT
    assert options == {"model": str(folder), "tp": 2, "served_model_name": NAME}
    named = resolve({"model": NAME, "served_model_name": "mine"}, weights=False)
    assert named == {"model": str(folder), "served_model_name": "mine"}
    on_ray = {"model": NAME, "backend": "ray"}
    assert resolve(on_ray) == on_ray
    with pytest.raises(LaunchError, match=r"--model: got 'Qwen/none', expected an existing folder"):
        resolve({"model": "Qwen/none"})
