"""The table of sockets: who binds what, and where.

| endpoint      | kind            | bound by  | connected by                        |
| ------------- | --------------- | --------- | ----------------------------------- |
| clients       | ROUTER ↔ DEALER | gateway   | clients (`--endpoint`)              |
| inner_clients | ROUTER ↔ DEALER | gateway   | http                                |
| tokenizers    | ROUTER ↔ DEALER | gateway   | tokenizers                          |
| requests      | PULL ← PUSH     | scheduler | tokenizers, gateway, detokenizers   |
| workers       | ROUTER ↔ DEALER | scheduler | workers                             |
| detokenizers  | ROUTER ↔ DEALER | scheduler | detokenizers                        |
| results       | PULL ← PUSH     | gateway   | detokenizers, scheduler             |
| pulses        | PULL ← PUSH     | launch    | every process (`launch all` binds)  |

All but the first are `ipc://` files in the run folder, or, on a cluster, names that its directory
knows the addresses of (`cluster.py`). What a scheduler binds there is once for each replica.
"""

from ipaddress import ip_address
from typing import NamedTuple

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import CLUSTER


class Endpoints(NamedTuple):
    """The address of every socket of one pipeline, as far as one replica uses it."""

    clients: str
    inner_clients: str
    tokenizers: str
    requests: str
    workers: str
    detokenizers: str
    results: str
    pulses: str


_OF_SCHEDULER = ("requests", "workers", "detokenizers")


def endpoints(config: Config, replica: int = 0) -> Endpoints:
    """The addresses that follow from the configuration."""
    is_cluster = config.on == "ray"
    where = CLUSTER if is_cluster else f"ipc://{config.run_folder}/"
    # In the folder `clients` may be --endpoint.
    own = "clients" if is_cluster else "inner"
    inner = (
        f"{where}{name}{(replica or '') if name in _OF_SCHEDULER else ''}"
        for name in (own, *Endpoints._fields[2:])
    )
    return Endpoints(config.endpoint, *inner)


def inner_clients(config: Config) -> str:
    """Where a process of the pipeline is a client of the gateway."""
    return endpoints(config).inner_clients


def stays_on_host(endpoint: str) -> bool:
    """Whether nobody on another machine can reach it: `ipc://`, or `tcp://` on loopback.

    Of names only `localhost` counts: another one, or an interface, may be anything.
    """
    transport, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    if transport != "tcp" or host == "localhost":
        return transport in ("ipc", "tcp")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_reach(config: Config) -> None:
    """Raises ValueError where other machines may reach the clients' socket in the clear."""
    if not (config.keys or config.insecure or stays_on_host(config.endpoint)):
        raise ValueError(
            f"--endpoint {config.endpoint} may be reached from other machines: give --keys FOLDER "
            "(`launch keys FOLDER` makes it), or --insecure, with which anyone may ask and anyone "
            "on the way reads prompts and answers"
        )
