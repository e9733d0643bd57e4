"""Flags made from a struct."""

import argparse
from typing import Any

import pytest

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_options, as_flags, flag, given_options
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs


def parse(*arguments: str, struct: Any = Config) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser, struct)
    return given_options(parser.parse_args(arguments), struct)


def test_what_is_not_given_is_not_set() -> None:
    assert parse() == {}


def test_every_field_is_a_flag() -> None:
    for field in OPTIONS:
        default = getattr(Config(), field)
        if isinstance(default, bool):
            assert parse(flag(field)) == {field: True}
            assert parse(f"--no-{flag(field)[2:]}") == {field: False}
        else:
            expected = [default] if field == "served_model_name" else default
            assert parse(flag(field), str(default)) == {field: expected}


@pytest.mark.parametrize(
    ("struct", "field", "value", "limit"),
    [
        (Config, "tp", "0", "expected `int` >= 1"),
        (Config, "tp", "two", "expected `int`"),
        (Config, "max_num_seqs", "2049", "expected `int` <= 2048"),
        (Config, "spare_workers", "257", "expected `int` <= 256"),
        (Config, "watermark", "1", "expected `float` < 1.0"),
        (Config, "watermark", "nan", "expected `float`"),
        (Config, "kv_offload_gib", "inf", "expected a finite number"),  # JSON has no infinity
        (Config, "hang_timeout", "inf", "expected a finite number"),
        (Config, "name", "a/b", "regex"),
        (SamplingParams, "logit_bias", '{"5": 101}', "expected `float` <= 100.0"),
        (SamplingParams, "logit_bias", "{", "truncated"),
        (SamplingParams, "allowed_token_ids", "[]", "length >= 1"),
        (SamplingParams, "bad_words", '[""]', "length >= 1"),
        (SamplingParams, "structured_outputs", '{"regx": "x"}', "unknown field `regx`"),
    ],
)
def test_a_bad_value_is_named_with_its_limit(
    struct: Any, field: str, value: str, limit: str
) -> None:
    with pytest.raises(LaunchError) as refused:
        parse(flag(field), value, struct=struct)
    assert str(refused.value).startswith(f"{flag(field)}: got {value!r}, ")
    assert limit in str(refused.value)


def test_sampling_parameters_are_flags_too() -> None:
    given = parse("--max-tokens", "5", "--temperature", "0.5", "--stop", "x", struct=SamplingParams)
    assert given == {"max_tokens": 5, "temperature": 0.5, "stop": "x"}


def test_what_has_parts_is_json() -> None:
    bias, grammar = '{"5": -100, "6": 1.5}', '{"regex": "[0-9]+"}'
    flags = ("--logit-bias", bias, "--stop-token-ids", "[1, 2]", "--structured-outputs", grammar)
    assert parse(*flags, struct=SamplingParams) == {
        "logit_bias": {5: -100, 6: 1.5},
        "stop_token_ids": [1, 2],
        "structured_outputs": StructuredOutputs(regex="[0-9]+"),
    }
    assert parse("--stop", '["x"]', struct=SamplingParams) == {"stop": '["x"]'}  # a text is one


def test_options_become_flags() -> None:
    options = {"tp": 2, "enable_prefix_caching": False, "model": "/a b"}
    flags = ["--tp", "2", "--no-enable-prefix-caching", "--model", "/a b"]
    assert list(as_flags(options)) == flags
    assert list(as_flags({"enable_prefix_caching": True})) == ["--enable-prefix-caching"]
