"""The address at which a worker's group finds it."""

import os
import socket

import pytest

from penstock.services.worker.process import free_rendezvous, use_interface_of


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_port_of_a_rendezvous_can_be_listened_at(host: str, written: str) -> None:
    scheme, _, address = free_rendezvous(host).partition("://")
    name, _, port = address.rpartition(":")
    assert (scheme, name) == ("tcp", written)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, int(port)), family=family).close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the interface; restore it after the test."""
    monkeypatch.setattr(os, "environ", {})


def test_collectives_go_by_the_interface_of_the_address() -> None:
    use_interface_of("127.0.0.1", spans_nodes=True)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_gloo_on_one_machine_looks_up_no_name() -> None:
    use_interface_of("127.0.0.1", spans_nodes=False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_an_interface_that_the_user_chose_stays() -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "ib0"
    use_interface_of("127.0.0.1", spans_nodes=True)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(
        ConnectionError, match=r"got 192\.0\.2\.1, expected an address of this machine"
    ):
        use_interface_of("192.0.2.1", spans_nodes=True)
