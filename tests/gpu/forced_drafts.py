"""Drafts that count as right by their number: the speed of a given acceptance, with random weights.

The text is that of the drafts. A checkpoint of random weights has no layer that predicts anything,
so this is how the gain of drafts is measured without a trained model.
"""

from penstock.services.scheduler.proposer import KNOWN, Proposer


def force(number: int) -> None:
    """Make the first `number` drafts of each step right in this process, and the others wrong."""
    send, check = Proposer.send, Proposer.check

    def counting_send(self: Proposer, inputs: list[int]) -> None:
        send(self, inputs)
        self.num_sent = len(self._inputs)  # type: ignore[attr-defined]

    def forced_check(self: Proposer) -> bool | None:
        draft = self._inputs[0] if self._inputs else KNOWN
        if draft != KNOWN:
            place = self.num_sent - len(self._inputs)  # type: ignore[attr-defined]
            is_right = place <= number  # the token before the drafts is at place 0
            self.token_ids[-1] = draft if is_right else (draft + 1) % 1000
        return check(self)

    Proposer.send, Proposer.check = counting_send, forced_check  # type: ignore[method-assign]
