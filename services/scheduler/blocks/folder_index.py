"""The folder tier: the blocks that all ranks have as files, and requests to read them. No I/O."""

from collections.abc import Iterator

from penstock.protocol.messages.worker import FolderReport


class _Reading:
    """A file that ranks read into a host slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.ranks = 0  # bits of the ranks that have reported
        self.is_right = True


class FolderIndex:
    """Files by the hash of the whole prefix, as the ranks of one epoch report them."""

    def __init__(self, epoch: int, num_ranks: int) -> None:
        self.epoch = epoch
        self._all_ranks = (1 << num_ranks) - 1
        self._ranks: dict[bytes, int] = {}  # bits of the ranks that have a file
        self._reading: dict[bytes, _Reading] = {}

    def __contains__(self, hash_: bytes) -> bool:
        return self._ranks.get(hash_) == self._all_ranks

    @property
    def slots(self) -> list[int]:
        """Host slots into which files are read."""
        return [one.slot for one in self._reading.values()]

    def is_reading(self, hash_: bytes) -> bool:
        return hash_ in self._reading

    def read(self, hash_: bytes, slot: int) -> None:
        """Note that all ranks are requested to read a file."""
        self._reading[hash_] = _Reading(slot)

    def remove(self, hash_: bytes) -> bool:
        """Forget a file that may be wrong. Return whether any rank has it."""
        if reading := self._reading.get(hash_):
            reading.is_right = False
        return self._ranks.pop(hash_, 0) != 0

    def on_report(self, report: FolderReport) -> Iterator[tuple[bytes, int, bool]]:
        """Note a report; yield hash, slot and success of each file that all ranks have read."""
        bit = 1 << report.rank
        for hash_ in report.added:
            self._ranks[hash_] = self._ranks.get(hash_, 0) | bit
        for hash_ in (*report.removed, *report.failed):
            if (ranks := self._ranks.get(hash_, 0) & ~bit) == 0:
                self._ranks.pop(hash_, None)
            else:
                self._ranks[hash_] = ranks
        for is_right, hashes in ((True, report.fetched), (False, report.failed)):
            for hash_ in hashes:
                if reading := self._reading.get(hash_):
                    reading.ranks |= bit
                    reading.is_right &= is_right
                    if reading.ranks == self._all_ranks:
                        del self._reading[hash_]
                        yield hash_, reading.slot, reading.is_right
