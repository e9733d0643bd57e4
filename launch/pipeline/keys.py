"""Keys of a gateway and of its clients."""

import tempfile
from pathlib import Path

import msgspec
from zmq.auth import create_certificates

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import DEFAULT_CLIENT, Name
from penstock.protocol.transport.context import CLIENTS, SERVER


def make_keys(folder: Path, client: str | None) -> list[Path]:
    """Make a folder with the keys of a gateway and one client, or add a client.

    Return the paths of new secret files. Raises LaunchError; no file is ever overwritten.
    """
    try:
        if client is not None:
            msgspec.convert(client, Name)
            return [_make_pair(folder, client, folder / CLIENTS)]
        folder.mkdir(mode=0o700)
        (folder / CLIENTS).mkdir(mode=0o700)
        server = _make_pair(folder, SERVER, folder)
        return [server, _make_pair(folder, DEFAULT_CLIENT, folder / CLIENTS)]
    except FileExistsError as error:
        raise LaunchError(
            f"{error.filename} exists already; --client NAME adds a client to a folder of keys"
        ) from error
    except msgspec.ValidationError as error:
        expected = str(error).replace("Expected", "expected")
        raise LaunchError(f"--client: got {client!r}, {expected}") from error
    except OSError as error:
        raise LaunchError(f"keys can't be made in {folder}: {error.strerror}") from error


def _make_pair(folder: Path, name: str, public_folder: Path) -> Path:
    """Make both files elsewhere, so that a running gateway finds only whole public keys."""
    secret, public = folder / f"{name}.key_secret", public_folder / f"{name}.key"
    for path in (secret, public):
        if path.exists():
            raise FileExistsError(None, None, str(path))
    if name != SERVER and not (folder / f"{SERVER}.key").exists():
        raise LaunchError(f"{folder} has no {SERVER}.key; `launch keys {folder}` makes a folder")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        new_public, new_secret = map(Path, create_certificates(made, name))
        for new, path in ((new_secret, secret), (new_public, public)):
            new.chmod(0o600)
            new.rename(path)
    return secret
