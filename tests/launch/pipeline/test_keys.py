"""`launch keys`: files, their modes, and that nothing is overwritten."""

from pathlib import Path

import pytest
import zmq

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.transport.context import (
    KeysError,
    admitted_keys,
    secure_client,
    secure_server,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", None)
    return tmp_path / "keys"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_new_folder_has_the_server_and_one_client(folder: Path) -> None:
    assert set(content(folder)) == {
        "server.key",
        "server.key_secret",
        "clients/client.key",
        "client.key_secret",
    }
    assert len(admitted_keys(folder)) == 1


def test_only_this_user_can_read_them(folder: Path) -> None:
    make_keys(folder, "alice")
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_a_client_is_added(folder: Path) -> None:
    before = content(folder)
    assert make_keys(folder, "alice") == [folder / "alice.key_secret"]
    after = content(folder)
    assert set(after) - set(before) == {"alice.key_secret", "clients/alice.key"}
    assert after.items() > before.items()
    assert len(admitted_keys(folder)) == 2


@pytest.mark.parametrize("client", [None, "client", "server"])
def test_nothing_is_overwritten(folder: Path, client: str | None) -> None:
    before = content(folder)
    with pytest.raises(LaunchError, match=r"exists already; --client NAME adds a client"):
        make_keys(folder, client)
    assert content(folder) == before


def test_a_client_whose_secret_was_moved_away_is_not_made_anew(folder: Path) -> None:
    (folder / "client.key_secret").unlink()
    before = content(folder)
    with pytest.raises(LaunchError, match=r"clients/client.key exists already"):
        make_keys(folder, "client")
    assert content(folder) == before


@pytest.mark.parametrize(
    ("where", "client", "sentence"),
    [
        ("", "alice", r"has no server.key; `launch keys .*` makes a folder"),
        ("none/keys", None, r"keys can't be made in .*: No such file or directory"),
        ("none", "a/b", r"--client: got 'a/b', .*regex"),
        ("", None, "exists already"),
    ],
)
def test_what_can_not_be_is_a_sentence(
    tmp_path: Path, where: str, client: str | None, sentence: str
) -> None:
    with pytest.raises(LaunchError, match=sentence):
        make_keys(tmp_path / where, client)
    assert list(tmp_path.iterdir()) == []


def test_keys_that_can_not_be_read_are_named(folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        with pytest.raises(KeysError, match=r"bob.key_secret can't be read; `launch keys`"):
            secure_client(socket, folder, "bob")
        (folder / "server.key_secret").write_bytes((folder / "server.key").read_bytes())
        with pytest.raises(KeysError, match=r"server.key_secret has no secret key"):
            secure_server(socket, folder)
        (folder / "clients" / "client.key").write_text("nonsense")
        with pytest.raises(KeysError, match="No public key found"):
            admitted_keys(folder)
