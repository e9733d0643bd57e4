"""Errors of `launch all` before anything starts."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.launch.bench.pipeline import STAND_IN
from penstock.launch.commands import start as module
from penstock.launch.commands.cli import make_parser
from penstock.launch.commands.start import (
    addresses_to_choose,
    check_endpoint,
    check_http_port,
    check_http_reach,
    checked_addresses,
    start,
    with_method,
)
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.keys import make_keys
from penstock.launch.pipeline.procfile import PROCFILE, read_procfile
from penstock.launch.pipeline.run_folder import claim, running_config
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config, run_folder
from tests.pipeline.ports import free_port

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Start a pipeline for a model with these facts: the sentence that refuses it."""

    def begin(facts: dict[str, object], tp: int = 1, **fields: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(MODEL | facts))
        with pytest.raises(LaunchError) as error:
            start(Config(name="x", model=str(tmp_path), tp=tp, **fields), PROCFILE, 5)
        return str(error.value)

    monkeypatch.setattr(module, "Supervisor", None)
    return begin


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--model: model folder .*/none does not exist"):
        start(Config(model=str(tmp_path / "none")), PROCFILE, 5)


def test_spare_workers_that_form_no_group_are_reported(
    refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the start continues; here its folder lacks the weights."""
    for spares, is_reported in ((0, False), (1, True), (2, False)):
        refused({}, 2, spare_workers=spares)
        assert ("--spare-workers: got" in capsys.readouterr().err) == is_reported


@pytest.mark.parametrize(
    ("limit", "words", "expected"),
    [
        (64, "all --tokenizers 20", "64, expected 278 or more for 25 processes; raise"),
        (10, "ask --endpoint ipc:///none x", "10, expected 32 or more; raise it (`ulimit -n`)"),
    ],
)
def test_fewer_open_files_than_are_needed(
    tmp_path: Path, limit: int, words: str, expected: str
) -> None:
    launch = f"ulimit -n {limit}; exec {sys.executable} -P -m penstock.launch {words}"
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    ran = subprocess.run(["sh", "-c", launch], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith(f"launch: open files: got a limit of {expected}")


YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
REACHED = "may be reached from other machines: "
TEMPLATE = "default_chat_template_kwargs"
NO_ADDRESS = "expected an address of this machine or its name"


@pytest.mark.parametrize(
    ("facts", "fields", "sentence"),
    [
        ({"architectures": ["Llama"]}, {}, "architectures: got ['Llama'], expected Qwen3ForCausal"),
        ({}, {"tp": 3}, "--tp: got 3, expected a divisor of the model's num_attention_heads, 4"),
        ({}, {"max_model_len": 9}, "--max-model-len: got 9, expected at most 8, the positions of "),
        (YARN, {"max_model_len": 33}, "--max-model-len: got 33, expected at most 32, the positio"),
        *(
            ({}, {"endpoint": endpoint}, f"--endpoint {endpoint} {REACHED}")
            for endpoint in ("tcp://0.0.0.0:55", "tcp://*:55", "tcp://[::]:55", "tcp://gpu1:55")
        ),
        *(
            ({}, {"http_host": host}, f"--http-host {host} {REACHED}")
            for host in ("0.0.0.0", "::")  # noqa: S104
        ),
        *(
            ({}, {"http_host": host}, f"--http-host: got {host!r}, {NO_ADDRESS}")
            for host in ("nosuchhost.invalid", "/run/x.sock", "a" * 70 + ".b")
        ),
        ({}, {"allowed_origins": "[1"}, "--allowed-origins: got '[1', expected "),
        *(
            ({}, {TEMPLATE: text}, f"--default-chat-template-kwargs: got {text!r}, expected a JSON")
            for text in ("[]", "{a}")
        ),
    ],
)
def test_what_is_refused_before_anything_starts(
    refused: Callable[..., str], facts: dict[str, object], fields: dict[str, Any], sentence: str
) -> None:
    said = refused(facts, **fields)
    assert said.startswith("--")
    assert sentence in said
    assert not run_folder("x").exists()


def test_a_checkpoint_without_its_files(refused: Callable[..., str], tmp_path: Path) -> None:
    """Weights are needed only by the product's own worker."""
    fields = {"endpoint": f"ipc://{tmp_path}/clients", "http": 0}
    assert "has no tokenizer.json; a checkpoint needs it" in refused({}, 1, **fields)
    shutil.copyfile(Config().model_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    assert refused({}, 1, **fields) == (
        f"--model: {tmp_path} has no model.safetensors; a checkpoint needs it"
    )
    config, commands = Config(model=str(tmp_path)), read_procfile(PROCFILE)
    model = read_model_config(tmp_path)
    module._check_files(config, model, commands | {"worker": STAND_IN})
    with pytest.raises(LaunchError, match=r"has no model\.safetensors"):
        module._check_files(config, model, commands)


def test_a_run_folder_too_deep_for_sockets(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one character, for the socket of the longest name."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        missing = zmq.IPC_PATH_MAX_LEN - len(str(run_folder("x") / "detokenizers9"))
        for length, sentence in ((missing - 1, "may be reached"), (missing, "XDG_RUNTIME_DIR")):
            deep = Path(folder) / ("x" * length)
            deep.mkdir()
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
            assert sentence in refused({}, 1, dp=10, endpoint="tcp://*:5555")


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_run_folder_too_deep_names_its_variable(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    deep = tmp_path / ("x" * zmq.IPC_PATH_MAX_LEN)
    deep.mkdir()
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(deep))
    assert refused({}, 1).startswith(f"{variable}: got socket path {deep}")


def test_keys_that_can_not_be_read(refused: Callable[..., str], tmp_path: Path) -> None:
    sentence = refused({}, 1, endpoint="tcp://*:5555", curve_keys=str(tmp_path / "none"))
    assert "none/server.key_secret can't be read; `launch keys` makes it" in sentence
    make_keys(tmp_path / "keys", None)
    (tmp_path / "keys" / "client.key_secret").unlink()
    assert "client.key_secret can't be read" in refused({}, 1, curve_keys=str(tmp_path / "keys"))


def test_a_free_endpoint(tmp_path: Path) -> None:
    check_endpoint(f"ipc://{tmp_path}/free")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/stale")
    check_endpoint(f"ipc://{tmp_path}/stale")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    check_endpoint(f"tcp://127.0.0.1:{port}")


def test_an_endpoint_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--endpoint tcp://127.0.0.1:{port} is in use"):
            check_endpoint(f"tcp://127.0.0.1:{port}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/taken")
        server.listen()
        with pytest.raises(LaunchError, match="/taken is in use"):
            check_endpoint(f"ipc://{tmp_path}/taken")
        assert (tmp_path / "taken").exists()


def test_an_endpoint_that_is_a_file(tmp_path: Path) -> None:
    """The file stays: libzmq would put a socket in its place."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(LaunchError, match="/notes can't be bound: File exists"):
        check_endpoint(f"ipc://{tmp_path}/notes")
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "used"),
    [("ipc://a/b", "ipc://{}/a/b"), ("ipc:///a", "ipc:///a"), ("ipc://@a", "ipc://@a")],
)
def test_an_endpoint_is_the_same_in_every_folder(
    given: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Config] = []
    monkeypatch.setattr(module, "start", lambda config, *_: configs.append(config))
    monkeypatch.chdir(tmp_path)
    module._run_all(make_parser().parse_args(["all", "--endpoint", given]))
    assert configs[0].endpoint == used.format(tmp_path)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("nonsense", "udp://127.0.0.1:5555", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"),
        "tcp://x.invalid:1",
    ],
)
def test_an_endpoint_that_can_not_be(endpoint: str) -> None:
    with pytest.raises(LaunchError, match="--endpoint "):
        check_endpoint(endpoint)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_http_port_in_use(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, reuse_port=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--http-port {port} is in use; give another one"):
            check_http_port(Config(http=1, http_host=host, http_port=port))
        check_http_port(Config(http=0, http_host=host, http_port=port))
    check_http_port(Config(http=1, http_host=host, http_port=port))


def test_an_http_host_that_is_none_of_ours() -> None:
    host = "192.0.2.1"
    with pytest.raises(LaunchError, match=f"--http-host {host}, --http-port 8000: Cannot assign"):
        check_http_port(Config(http=1, http_host=host, api_key="x"))


def test_http_hosts_that_others_reach_need_a_key_or_a_word() -> None:
    for more in ({"api_key": "x"}, {"insecure": True}):
        check_http_reach(Config(http_host="::", **more))  # type: ignore[arg-type]
    for host in ("localhost", "::1", "[::1]"):
        check_http_reach(Config(http_host=host))
    check_http_reach(Config(allowed_origins='["http://a"]'))


def test_only_a_name_lets_the_addresses_be_chosen() -> None:
    assert addresses_to_choose({"tp": 2}) == set()
    assert addresses_to_choose({"name": "second"}) == {"endpoint", "http_port"}
    assert addresses_to_choose({"name": "second", "http_port": 1}) == {"endpoint"}


def test_free_addresses_are_chosen_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Ports that others listen at, or that another pipeline has just chosen, are left out."""
    chosen = addresses_to_choose({"name"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = Config(name="second", endpoint=f"tcp://127.0.0.1:{port}", http_port=port)
        with claim(own), claim(Config(name="third")):
            second = checked_addresses(own, chosen)
            assert running_config("second") == second
            assert f"'second' gets {second.endpoint} and http://" in capsys.readouterr().out
            third = checked_addresses(msgspec.structs.replace(own, name="third"), chosen)
    ports = [int(config.endpoint.rpartition(":")[2]) for config in (second, third)]
    assert port < ports[0] < ports[1] < port + module.MAX_PORTS
    assert port < second.http_port < third.http_port < port + module.MAX_PORTS


def test_a_free_address_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    own = Config(name="x", endpoint=f"tcp://127.0.0.1:{free_port()}", http_port=free_port())
    with claim(own):
        assert checked_addresses(own, addresses_to_choose({"name"})) == own
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("chosen", "option"), [("endpoint", "http-port"), ("http_port", "endpoint")]
)
def test_no_free_port_is_told_where_a_given_address_is_in_use(
    capsys: pytest.CaptureFixture[str], chosen: str, option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = Config(name="x", endpoint=f"tcp://127.0.0.1:{port}", http_port=port)
        with claim(own), pytest.raises(LaunchError, match=rf"--{option} .*{port} is in use; give"):
            checked_addresses(own, {chosen})
    assert not capsys.readouterr().out


def test_no_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PORTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = Config(name="x", http_port=taken.getsockname()[1])
        with claim(own), pytest.raises(LaunchError, match=f"--http-port {own.http_port} is in use"):
            checked_addresses(own, {"http_port"})


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"), [("auto", 1, "mtp"), ("auto", 0, "none"), ("cpu", 1, "none")]
)
def test_drafts_of_the_layer_are_the_default_on_gpus(
    device: str, gpus: int, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "num_gpus", lambda: gpus)

    def method(model: Path | str, **options: Any) -> str:
        return with_method(Config(model=str(model), device=device, **options)).speculative_method

    assert method("demo-hybrid") == chosen
    assert method("") == "none"
    assert method("demo-hybrid", speculative_method="ngram") == "ngram"
    assert method(tmp_path) == "none"
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"mtp.fc.weight": "a"}}')
    assert method(tmp_path) == chosen
    assert method(tmp_path, backend="ray") == "none"
    own, configs = ("--device", device), list[Config]()
    monkeypatch.setattr(module, "start", lambda config, *_: configs.append(config))
    for models in (["demo-hybrid"], ["demo-hybrid", str(Config().model_folder)]):
        options = [f"{name}={value}" for m in models for name, value in (("--model", m), own)]
        module._run_all(make_parser().parse_args(["all", *options]))
        found = configs[-1].models or configs[-1:]
        assert [model.speculative_method for model in found] == [chosen, "none"][: len(models)]
        assert configs[-1].speculative_method == chosen
