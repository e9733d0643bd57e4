"""The configuration from the environment, and the run folder."""

import os
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.protocol.config import (
    Config,
    config_from_environment,
    make_run_folder,
    read_config,
    with_api_key,
    write_config,
)
from penstock.protocol.transport.context import Context, endpoints


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)


def test_variables_win_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TP", "2")
    monkeypatch.setenv("PENSTOCK_ENABLE_PREFIX_CACHING", "false")
    assert config_from_environment() == Config(tp=2, enable_prefix_caching=False)


def test_a_bad_variable_names_field_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TP", "0")
    with pytest.raises(msgspec.ValidationError, match=r"PENSTOCK_TP: got '0', expected `int` >= 1"):
        config_from_environment()


def test_the_file_of_launch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(tp=4, name="four")
    path = write_config(config)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    monkeypatch.setenv("PENSTOCK_TP", "2")
    assert config_from_environment() == read_config(path) == config


def test_what_is_made_in_it_is_for_this_user_only() -> None:
    """The file may have the API key."""
    os.umask(0o022)
    path = write_config(Config(api_key="x"))
    assert path.stat().st_mode & 0o777 == 0o600
    with Context() as context:
        address = endpoints(Config())[1]
        context.bind(zmq.PULL, address, None).socket.close()
    assert Path(address.removeprefix("ipc://")).stat().st_mode & 0o077 == 0


def test_the_run_folder_is_for_this_user_only() -> None:
    folder = make_run_folder(Config(name="mine"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert all(str(folder) in address for address in endpoints(Config(name="mine"))[1:])


def test_where_the_api_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "of the environment\n")
    file = tmp_path / "key"
    file.write_text("of the file\nmore\n")
    config = Config(api_key_file=str(file))
    assert with_api_key(Config()).api_key == "of the environment"
    assert with_api_key(config).api_key == "of the file"
    assert with_api_key(Config(api_key="given", api_key_file=str(file))).api_key == "given"
    monkeypatch.setenv("PENSTOCK_API_KEY_FILE", str(file))
    monkeypatch.delenv("PENSTOCK_API_KEY")
    assert config_from_environment().api_key == "of the file"
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"api_key_file: the first line of .*key is empty"):
        with_api_key(config)
    with pytest.raises(FileNotFoundError):
        with_api_key(Config(api_key_file=str(tmp_path / "none")))


def test_several_models_are_in_one_file() -> None:
    models = (Config(served_model_name="one"), Config(served_model_name="two", tp=2))
    config = Config(name="n", served_model_name="one", models=models)
    path = write_config(config)
    assert read_config(path) == config
    one, two = config.by_model()
    assert endpoints(one).supervisor == endpoints(two).supervisor == endpoints(config).supervisor
    assert endpoints(one).inner_clients == endpoints(two).inner_clients
    assert not set(endpoints(one)[2:-1]) & set(endpoints(two)[2:-1])
    assert make_run_folder(two).parent == path.parent


def test_several_names_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SERVED_MODEL_NAME", "a org/b")
    config = config_from_environment()
    assert config.model_names == ["a", "org/b"]
    assert read_config(write_config(config)) == config


def test_an_http_host_may_have_the_brackets_of_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config(http_host="[::1]") == Config(http_host="::1")
    monkeypatch.setenv("PENSTOCK_HTTP_HOST", "[::1]")
    assert config_from_environment().http_host == "::1"
