"""CPU time of grammars' masks.

An ambiguous grammar may take more time for each mask than for the one before, within all limits of
llguidance, while every other row waits. So a grammar has a budget. Only masks of steps that are
slow as a whole are timed one by one; of other steps, only the duration is measured.
"""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, thread_time

from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from penstock.services.worker.logits.processed_row import Bitmask

# of CPU time for the slow masks of a row, in addition to `SECONDS_PER_STEP`. JSON schemas take 0.01
# to 0.4 ms a mask with Qwen3's vocabulary; one mask in hundreds takes 7 ms
MAX_MASK_SECONDS = 0.1
SECONDS_PER_STEP = 0.001
SLOW_SECONDS = 0.004  # of all masks of a step, which are then timed; of one mask, which then counts


class TimedMatcher:
    """A row's matcher and the time that its slow masks took."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_timed = False
        self.seconds = 0.0
        self.first_step = 0  # of which a mask was slow; 0: none


class MaskFiller:
    """Threads that compute masks."""

    def __init__(self, executor: LLExecutor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(thread_name_prefix="masks")  # of timed masks
        self._num_steps = 0

    def fill(self, masks: Bitmask, rows: list[tuple[TimedMatcher, int]]) -> list[int]:
        """Write the masks of rows, given with their slots; return slots that exceed the budget."""
        self._num_steps += 1
        timed = [row for row in rows if row[0].is_timed]
        others = [(row.matcher, slot) for row, slot in rows if not row.is_timed]
        if others:
            begin = perf_counter()
            fill_next_token_bitmask_par(self._executor, others, masks)
            if perf_counter() - begin > SLOW_SECONDS:
                for row, _ in rows:
                    row.is_timed = True
        return self._fill_timed(masks, timed) if timed else []

    def _fill_timed(self, masks: Bitmask, rows: list[tuple[TimedMatcher, int]]) -> list[int]:
        def fill(row: tuple[TimedMatcher, int]) -> float:
            begin = thread_time()
            fill_next_token_bitmask(row[0].matcher, masks, row[1])
            return thread_time() - begin

        exceeding = []
        for (row, slot), seconds in zip(rows, self._threads.map(fill, rows), strict=True):
            row.is_timed = seconds > SLOW_SECONDS
            if not row.is_timed:
                continue
            row.seconds += seconds
            row.first_step = row.first_step or self._num_steps
            steps = self._num_steps - row.first_step
            if row.seconds > MAX_MASK_SECONDS + SECONDS_PER_STEP * steps:
                exceeding.append(slot)
        return exceeding
