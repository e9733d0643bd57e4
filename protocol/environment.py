"""The configuration of a process, and what of it comes from the environment or from a file."""

import os
from pathlib import Path

import msgspec

from penstock.protocol.config import CONFIG_VARIABLE, Config, read_config

API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def config_from_environment() -> Config:
    """What `launch` wrote, or `PENSTOCK_<FIELD>` variables over the defaults. Raises OSError and
    ValueError for a file of a key that can't be used."""
    if path := os.environ.get(CONFIG_VARIABLE):
        return read_config(Path(path))
    given = {
        field: os.environ[f"PENSTOCK_{field.upper()}"]
        for field in Config.__struct_fields__
        if f"PENSTOCK_{field.upper()}" in os.environ
    }
    return with_api_key(msgspec.convert(given, Config, strict=False))


def with_api_key(config: Config) -> Config:
    """`config` with the API key: given, in `api_key_file`, or in the environment, in this order.

    Raises OSError for a file that can't be read, ValueError for one without a key.
    """
    key = config.api_key
    if not key and config.api_key_file:
        key = Path(config.api_key_file).read_text().partition("\n")[0].strip()
        if not key:
            raise ValueError(f"api_key_file: the first line of {config.api_key_file} is empty")
    return msgspec.structs.replace(config, api_key=key or os.environ.get(API_KEY_VARIABLE, ""))
