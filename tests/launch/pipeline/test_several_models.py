"""Options of several models: whose they are, and which names and GPUs models get."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.commands import gpus
from penstock.launch.commands.start import add_arguments, check_names, config_of, start
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import as_flags, options_by_model
from penstock.launch.pipeline.procfile import PROCFILE, process_names, read_procfile
from penstock.protocol.config import Config

DEMO = ("--model", "", "--served-model-name")


def given(*words: str) -> list[dict[str, Any]]:
    command = argparse.ArgumentParser()
    add_arguments(command)
    return options_by_model(command.parse_args(words))


def served(*words: str) -> Config:
    return config_of(given(*words))


def test_with_one_model_the_order_changes_nothing() -> None:
    assert given() == [{}]
    assert given("--tp", "2") == [{"tp": 2}]
    expected = [{"tp": 2, "http": 0, "model": "a"}]
    assert given("--http", "0", "--tp", "2", "--model", "a") == expected
    assert given("--model=a", "--http", "0", "--tp", "2") == expected
    for words in (("a", "--tp", "2"), ("--tp", "2", "a")):
        assert given(*words, "--http", "0") == expected


def test_a_model_without_a_flag_is_the_only_model() -> None:
    sentence = "^MODEL: got 'a' and --model b, expected one of them; several models are --model A"
    for words in (("a", "--model", "b"), ("--model", "b", "a")):
        with pytest.raises(LaunchError, match=sentence):
            given(*words)


def test_options_after_a_model_are_its_own() -> None:
    common = ("--name", "n", "--tp", "2", "--device", "cpu")
    first = ("--model", "a", "--tp", "4", "--http", "0")
    second = ("--model", "b", "--no-enable-prefix-caching", "--log-level", "error")
    of_all = {"name": "n", "http": 0, "log_level": "error", "device": "cpu"}
    assert given(*common, *first, *second) == [
        of_all | {"model": "a", "tp": 4},
        of_all | {"model": "b", "tp": 2, "enable_prefix_caching": False},
    ]


def test_each_has_a_configuration_processes_and_sockets() -> None:
    config = served("--name", "n", *DEMO, "one", "--dp", "2", *DEMO, "org/two", "--tp", "2")
    one, two = config.by_model()
    assert (one.model_name, one.name, one.dp, one.tp) == ("one", "n/@one", 2, 1)
    assert (two.model_name, two.name, two.dp, two.tp) == ("org/two", "n/@two", 1, 2)
    assert config.of_process("two/worker.2") == two
    assert config.of_process("gateway.1") == config
    assert one.run_folder.parent == two.pipeline_folder == config.run_folder
    assert process_names(config, read_procfile()) == [
        *("gateway.1", "one/tokenizer.1", "two/tokenizer.1"),
        *("one/scheduler.1", "one/scheduler.2", "two/scheduler.1"),
        *("one/worker.1", "one/worker.2", "two/worker.1", "two/worker.2"),
        *("one/detokenizer.1", "two/detokenizer.1", "http.1"),
    ]


@pytest.mark.parametrize(
    "names", [["one"], ["org/one"], ["a/"], ["two", "one"], ["two", "uno"], ["two", "b", "uno"]]
)
def test_names_differ(names: list[str]) -> None:
    with pytest.raises(LaunchError, match="--served-model-name: got "):
        served(*DEMO, "one", "uno", *DEMO, *names)


def test_a_model_may_have_several_names() -> None:
    config = served(*DEMO, "one", "org/uno", "one", *DEMO, "two")
    assert [model.model_names for model in config.by_model()] == [["one", "org/uno"], ["two"]]
    assert [model.model_name for model in config.by_model()] == ["one", "two"]
    assert Config(model="/a/b").model_names == ["b"]
    assert Config().model_names == Config(served_model_name="").model_names == ["qwen3-demo"]
    flags = [*as_flags({"served_model_name": ("a", "b"), "tp": 2})]
    assert flags == ["--served-model-name", "a", "b", "--tp", "2"]
    with pytest.raises(LaunchError, match="expected a name without control characters"):
        check_names(Config(served_model_name=("a", 'a"b')), [])


def test_ray_serves_one() -> None:
    with pytest.raises(LaunchError, match="got 2, expected one with --backend ray"):
        served("--backend", "ray", "--model", "", "--model", "")


def test_what_is_refused_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = served(*DEMO, "one", *DEMO, "two", "--max-model-len", "9999")
    with pytest.raises(LaunchError, match="two: --max-model-len: got 9999, expected at most 4096"):
        start(config, PROCFILE, 5)


def on_gpus(num_gpus: int | None, monkeypatch: pytest.MonkeyPatch, **models: Any) -> dict[str, str]:
    """Return the GPUs of models with these options."""
    monkeypatch.setattr(gpus, "num_gpus", lambda: num_gpus)
    options = (Config(served_model_name=name, **own) for name, own in models.items())
    return gpus.gpus_by_model(Config(models=tuple(options)))


def test_each_has_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    models = {"a": {"tp": 2}, "b": {"device": "cpu", "tp": 2}, "c": {"dp": 1}}
    expected = {"a": "0,1", "b": "", "c": "2"}
    assert on_gpus(4, monkeypatch, **models) == expected
    assert on_gpus(None, monkeypatch, **models) == expected
    assert on_gpus(0, monkeypatch, **models) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,GPU-3")
    assert on_gpus(3, monkeypatch, **models) == {"a": "7,5", "b": "", "c": "GPU-3"}
    with pytest.raises(LaunchError, match=r"c: --tp 1 and --dp 1 need 1 GPUs, .* leave 0;"):
        on_gpus(2, monkeypatch, a={"tp": 2}, c={"kv_cache_gib": 1.0})


def test_models_with_caches_of_a_fixed_size_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    small = {"kv_cache_gib": 4.0}
    assert on_gpus(1, monkeypatch, a=small, b=small, c=small) == {"a": "0", "b": "0", "c": "0"}
    two = small | {"tp": 2}
    assert on_gpus(2, monkeypatch, a=small, b=two) == {"a": "0", "b": "1,0"}
    assert on_gpus(2, monkeypatch, a={}, b=small, c=small) == {"a": "0", "b": "1", "c": "1"}


@pytest.mark.parametrize("name", ["all", "http", "org/worker", "gateway.1", "own"])
def test_a_name_does_not_mean_processes(name: str) -> None:
    """`launch restart gateway` has one meaning, also with kinds of one's own procfile."""
    kinds = [*read_procfile(), "own"]
    config = served(*DEMO, "one", *DEMO, name)
    with pytest.raises(LaunchError, match=f"--served-model-name: got '{name}', .* other than all"):
        check_names(config, kinds)
    check_names(Config(served_model_name=name), kinds)
    check_names(served(*DEMO, "one", *DEMO, "workers"), kinds)


@pytest.mark.parametrize("name", ["a\nb", 'a"b', "a'b", "a\x1b[1m", "a\u2028b", "a\udcff"])
def test_a_name_fits_into_a_line(name: str) -> None:
    long = ("--max-model-len", "9999")  # refused next, so that nothing starts
    one = Config(served_model_name=name, max_model_len=9999)
    for config in (one, served(*long, *DEMO, "one", *DEMO, name)):
        with pytest.raises(LaunchError, match="expected a name without control characters"):
            start(config, PROCFILE, 5)
    check_names(Config(served_model_name="Modèle 8B\\1"), read_procfile())
