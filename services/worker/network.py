"""Rendezvous of ranks on several machines: a port of this machine, and its interface."""

import os
import socket

import psutil


def free_rendezvous(host: str) -> str:
    """Return `tcp://host:port` with a port of this machine's address that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def use_interface_of(host: str) -> None:
    """Make gloo and NCCL use the interface with this machine's address, unless the user chose one.

    By default they use the first interface, which may not reach the peers. Raises ConnectionError.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == host for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
    raise ConnectionError(f"host: got {host}, expected an address of this machine's interfaces")
