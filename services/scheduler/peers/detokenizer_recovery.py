"""Detokenizers that register or are lost: streams move, and poison streams are found."""

from penstock.protocol.transport.process import predecessors
from penstock.services.scheduler.peers.streams import Outbox, Streams
from penstock.services.scheduler.sequences.sequence import Sequence

# detokenizers, the newest, whose streams are remembered: not each one has a successor
MAX_SILENT = 16


class RecoverableStreams(Streams):
    """Streams that outlive their detokenizer; `poison` has the rules of trials.

    A sequence can move at any time: its text follows from its tokens, and the gateway drops what it
    has already.
    """

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        # by detokenizer: whether its streams were a trial's, and these streams
        self._silent: dict[bytes, tuple[bool, dict[int, Sequence]]] = {}

    def alive(self, identity: bytes, name: str) -> bool:
        """Note a heartbeat. Return whether it is the first one, which registers the detokenizer."""
        self._silent.pop(identity, None)
        if not self.detokenizers.alive(identity, name):
            return False
        self._outboxes[identity] = Outbox()
        orphans, self._unassigned = self._unassigned, {}
        self._assign(orphans.values())
        self._rebalance()
        return True

    def _rebalance(self) -> None:
        """Move sequences from detokenizers that have more than their share."""
        num_sequences = sum(len(peer.work) for peer in self.detokenizers)
        share = -(-num_sequences // len(self.detokenizers))
        for peer in self.detokenizers:
            if peer.identity == self._trials.at:
                continue
            surplus = list(peer.work.values())[share:]
            for sequence in surplus:
                self.close(sequence)
            self._assign(surplus)

    def reopen(self, sequence: Sequence) -> None:
        self.close(sequence)
        self.open(sequence)

    def predecessors(self, identity: bytes) -> list[bytes]:
        """Return earlier incarnations of a detokenizer that registered: they have died."""
        return predecessors(identity, [*self._outboxes, *self._silent])

    def lose_silent(self) -> list[bytes]:
        """Move the sequences of detokenizers that missed heartbeats; called at each heartbeat."""
        trials, silent = self._trials, self.detokenizers.silent()
        for identity in silent:
            is_trial = identity == trials.at and bool(trials.batch) and not self._trial
            had = self.detokenizers.get(identity).work.values()  # type: ignore[union-attr]
            work = trials.batch if is_trial else had
            opened = {one.stream_id: one for one in work if one.stream_id not in self._unopened}
            self.lost(identity)
            self._silent[identity] = is_trial, opened
        while len(self._silent) > MAX_SILENT:
            del self._silent[next(iter(self._silent))]
        return silent

    def _blame(self, identity: bytes) -> tuple[list[Sequence], list[Sequence]]:
        """Try the streams with which a detokenizer fell silent that died. Return as `lost`."""
        is_trial, opened = self._silent.pop(identity)
        suspects = [one for stream_id, one in opened.items() if self._is_open(one, stream_id)]
        if is_trial:
            return suspects, self._trials.blame(suspects)
        for sequence in suspects:
            if not self._trials.has(sequence):
                self.close(sequence)
                sequence.detokenizer = None
                self._number(sequence)  # its detokenizer may get the trial before the closing
                self._trials.add([sequence])
        return suspects, []

    def _is_open(self, sequence: Sequence, stream_id: int) -> bool:
        peer = self.detokenizers.get(sequence.detokenizer)
        has_peer = peer is not None and stream_id in peer.work
        is_open = has_peer or stream_id in self._unassigned or self._trials.has(sequence)
        return is_open and sequence.stream_id == stream_id

    def lost(
        self, identity: bytes, has_died: bool = False
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Move the sequences of a detokenizer to others, with all their tokens.

        If it `has_died`, suspects are tried first. Return the suspects, and those of them that are
        given up, which have no detokenizer.
        """
        if identity in self._silent:
            return self._blame(identity)
        self._outboxes.pop(identity, None)
        lost = self.detokenizers.lost(identity)
        trials = self._trials
        is_tried = identity == trials.at
        suspects = [one for one in lost if has_died and one.stream_id not in self._unopened]
        given_up: list[Sequence] = []
        if is_tried and has_died and trials.batch and not self._trial:
            suspects, given_up = trials.batch, trials.failed()
        else:
            if is_tried:  # it has not received the trial
                trials.add(trials.batch)
                trials.at, trials.batch = b"", []
            trials.add(suspects)
        if is_tried:
            self._trial = None
        for sequence in suspects:
            sequence.detokenizer = None
        gone = {one.stream_id for one in given_up} | trials.waiting.keys()
        self._assign(one for one in lost if one.stream_id not in gone)
        return suspects, given_up

    def confirmed(self, identity: bytes) -> None:
        """Note a confirmation of a detokenizer: a trial begins, or has passed."""
        trials, outbox = self._trials, self._outboxes.get(identity)
        if identity != trials.at or outbox is None:
            return
        if trials.batch or not trials.waiting:
            trials.passed()
            return
        batch = trials.next_batch()
        peer = self.detokenizers.get(identity)
        for sequence in batch:
            sequence.detokenizer = identity
            peer.work[sequence.stream_id] = sequence  # type: ignore[union-attr]
        self._trial = identity, outbox.take_alone(self._epoch, batch)
