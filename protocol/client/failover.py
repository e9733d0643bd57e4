"""The addresses of a client's `--endpoint`, which are tried in turn."""

import re

from penstock.protocol.client.errors import ClientError

ADDRESS = re.compile(r"tcp://[\w.:;%*\[\]-]+:\d+|ipc://.+", re.ASCII)


def check_addresses(endpoint: str) -> None:
    """Raises ClientError for an address that is none."""
    for one in endpoint.split(","):
        if not ADDRESS.fullmatch(one):
            meant = f"; did you mean tcp://{one}?" if ADDRESS.fullmatch(f"tcp://{one}") else ""
            raise ClientError(
                f"--endpoint {endpoint}: {one!r} is neither tcp://HOST:PORT nor ipc://PATH{meant}"
            )


class Addresses:
    """One address, or several with commas between them, of which one is the current one."""

    def __init__(self, endpoint: str) -> None:
        # "*" is every interface to a server, and no address to a client
        usable = endpoint.replace("://*:", "://127.0.0.1:")
        self._all = list(dict.fromkeys(usable.split(",")))
        self.current = self._all[0]
        self._num_failures = 0
        """since there was a connection"""
        self._refused_by: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_refused(self) -> bool:
        """All of them have refused our key."""
        return len(self._refused_by) == len(self._all)

    def on_connected(self) -> None:
        """The current one answers: failures before do not count any more."""
        self._num_failures = 0
        self._refused_by.clear()

    def on_refused(self) -> None:
        """The current one refuses our key: libzmq does not try it again."""
        self._refused_by.add(self.current)

    def turn(self) -> bool:
        """Makes the next one that has not refused us the current one, if there is another one.

        Once a round it stays with the current one, which libzmq tries again after a pause: without
        it, a client would try in a circle as fast as it can. Those that refused us are tried again
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
