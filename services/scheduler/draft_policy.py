"""The number of drafts of multi-token prediction for a step, by measurement. No clock.

More drafts give more tokens a step and longer steps. A step also waits for the tokens of the step
before, whose drafts it names, where steps without drafts are planned ahead. So the policy measures
the seconds of steps, and chooses the number that gives most tokens a second.
"""

from collections import defaultdict

PROBE = 8  # steps in a row that are measured
PERIOD = 1024  # steps after which the other extreme, no draft or all, is measured again
WEIGHT = 1 / PROBE  # of a step in the mean


class DraftPolicy:
    """The seconds of steps by size of the batch and number of drafts."""

    def __init__(self, most: int) -> None:
        """Choose up to `most` drafts, and always as many if no seconds are measured."""
        self._most = most
        # binary size of the batch → number of drafts → mean seconds
        self._seconds: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._probe, self._steps_left = most, 0  # the number that is measured, and for how long
        self._chosen = most  # by the last measurements
        self._num_steps = 0
        self._is_timed = False

    def choose(self, num_others: int, acceptances: list[float]) -> int:
        """Return the number of drafts for each of some sequences.

        num_others: sequences in the step that get no drafts. acceptances: of each sequence, the
        share of drafts that are right.
        """
        if not self._is_timed:
            return self._most
        if not self._steps_left:
            self._begin_probe(self._seconds[(num_others + len(acceptances)).bit_length()])
        if self._steps_left:
            self._steps_left -= 1
            return self._probe
        seconds = self._seconds[(num_others + len(acceptances)).bit_length()]
        tokens = [float(num_others + len(acceptances))]
        for number in range(1, self._most + 1):
            tokens.append(tokens[-1] + sum(share**number for share in acceptances))
        plain, slope = seconds[0], (seconds[self._most] - seconds[0]) / self._most
        rates = [
            count / seconds.get(number, plain + slope * number)
            for number, count in enumerate(tokens)
        ]
        self._chosen = max(range(len(rates)), key=rates.__getitem__)
        return self._chosen

    def _begin_probe(self, seconds: dict[int, float]) -> None:
        """Begin to measure what is not known, or not any more."""
        self._num_steps += 1
        unknown = [number for number in (0, self._most) if number not in seconds]
        if not unknown and self._num_steps % PERIOD == 0:
            unknown = [0 if self._chosen else self._most]
        if unknown:
            # the first step of a probe has the drafts of the step before
            self._probe, self._steps_left = unknown[0], PROBE + 1

    def measure(self, num_sequences: int, number: int, seconds: float) -> None:
        """Record the seconds of a step that had, and makes, `number` drafts of each sequence."""
        self._is_timed = True
        known = self._seconds[num_sequences.bit_length()]
        before = known.get(number, seconds)
        # one step that was late, as of a machine that slept, must not count much
        known[number] = before + WEIGHT * (min(seconds, 4 * before) - before)
