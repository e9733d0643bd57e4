"""Data parallelism: which process belongs to which replica, by its name alone.

A replica is a scheduler with the workers of its own; gateway, tokenizers and detokenizers serve all
of them.
"""

from penstock.protocol.config import Config


def replica_of(name: str, config: Config) -> int:
    """Of a scheduler or worker, from 0 on; 0 for any other process.

    `scheduler.1` is replica 0. The first `tp` workers are of replica 0, the next `tp` of replica 1;
    those beyond `tp * dp` wait as spare ones, by turns for each replica.
    """
    kind, _, number = name.partition(".")
    if kind not in ("scheduler", "worker") or not number.isdecimal():
        return 0
    index = int(number) - 1
    if kind == "worker" and index < config.tp * config.dp:
        index //= config.tp
    return index % config.dp
