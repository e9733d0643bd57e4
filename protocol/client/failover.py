"""The failover between the addresses of a client's `--endpoint`."""

import re

from penstock.protocol.client.errors import ClientError

# up to 65535: libzmq would use the port modulo 65536
_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
ADDRESS = re.compile(rf"tcp://[\w.:;%*\[\]-]+:{_PORT}|ipc://.+", re.ASCII)


def check_addresses(endpoint: str) -> None:
    """Raise ClientError for an invalid address."""
    for one in endpoint.split(","):
        if not ADDRESS.fullmatch(one):
            meant = f"; did you mean tcp://{one}?" if ADDRESS.fullmatch(f"tcp://{one}") else ""
            raise ClientError(
                f"--endpoint: got {one!r}, expected tcp://HOST:PORT or ipc://PATH{meant}"
            )


class Addresses:
    """One address, or several separated by commas, with the current one."""

    def __init__(self, endpoint: str) -> None:
        # "*" is every interface to a server, not an address for a client
        usable = endpoint.replace("://*:", "://127.0.0.1:")
        self._all = list(dict.fromkeys(usable.split(",")))
        self.current = self._all[0]
        self._num_failures = 0  # since the latest connection
        self._refused_by: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_refused(self) -> bool:
        """True if all of them have refused our key."""
        return len(self._refused_by) == len(self._all)

    def on_connected(self) -> None:
        """Note that the current one answers; earlier failures no longer count."""
        self._num_failures = 0
        self._refused_by.clear()

    def on_refused(self) -> None:
        """Note that the current one refuses our key; libzmq does not retry it."""
        self._refused_by.add(self.current)

    def turn(self) -> bool:
        """Move to the next address that has not refused our key. Return False if there is none.

        Once a round it stays at the current one, which libzmq retries after a pause; otherwise a
        client would retry in a circle without pause. Addresses that refused our key are tried again
        in the next round.
        """
        if self.current not in self._refused_by:
            self._num_failures += 1
            if self._num_failures % (len(self._all) + 1) == 0:
                self._refused_by.clear()
                return False
        here = self._all.index(self.current)
        others = self._all[here + 1 :] + self._all[:here]
        self.current = next((one for one in others if one not in self._refused_by), self.current)
        return self.current != self._all[here]
