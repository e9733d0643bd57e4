"""The table of sockets: who binds what, and where.

| endpoint     | kind            | bound by  | connected by                        |
| ------------ | --------------- | --------- | ----------------------------------- |
| clients      | ROUTER ↔ DEALER | gateway   | clients (`--endpoint`)              |
| tokenizers   | ROUTER ↔ DEALER | gateway   | tokenizers                          |
| requests     | PULL ← PUSH     | scheduler | tokenizers, gateway, detokenizers   |
| workers      | ROUTER ↔ DEALER | scheduler | workers                             |
| detokenizers | ROUTER ↔ DEALER | scheduler | detokenizers                        |
| results      | PULL ← PUSH     | gateway   | detokenizers, scheduler             |

All but the first are `ipc://` files in the run folder.
"""

from typing import NamedTuple

from penstock.protocol.config import Config


class Endpoints(NamedTuple):
    """The address of every socket of one pipeline."""

    clients: str
    tokenizers: str
    requests: str
    workers: str
    detokenizers: str
    results: str


def endpoints(config: Config) -> Endpoints:
    """The addresses that follow from the configuration."""
    inner = (f"ipc://{config.run_folder}/{name}" for name in Endpoints._fields[1:])
    return Endpoints(config.endpoint, *inner)
