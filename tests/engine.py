"""Scheduler and model runner in one process, joined by encoded plans: no sockets."""

import gc
import queue
from collections.abc import Callable, Iterable

import msgspec

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import TokenizedRequest
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.worker import GrammarCompiled, WorkerAssignment
from penstock.protocol.tokenizer_file import read_eos_token_ids
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import Sequence
from penstock.services.worker.launched_step import LaunchedStep
from penstock.services.worker.loading import load

PLANS = msgspec.msgpack.Decoder(BatchPlan)


class Engine:
    """Scheduler and worker of one pipeline with `tp` 1, in this process."""

    def __init__(self, config: Config) -> None:
        gc.collect()  # an earlier engine that is freed during a capture may invalidate it
        self.model = read_model_config(config.model_folder)
        self.runner = load(config, WorkerAssignment(1, "g", 0, 1, ""), lambda: None)
        states = self.runner.num_state_blocks and BlockPool(self.runner.num_state_blocks)
        blocks = BlockManager.from_config(
            config, self.runner.num_blocks, self.runner.block_size, states=states or None
        )
        max_model_len = self.model.context(config.max_model_len)
        self.scheduler = Scheduler(config, max_model_len, blocks)
        self.eos_token_ids = frozenset(read_eos_token_ids(config.model_folder))
        self._steps: list[LaunchedStep] = []

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        bad_words: Iterable[list[int]] = (),
    ) -> Sequence:
        """Put a request into the queue."""
        request = TokenizedRequest(request_id, 0, sampling, pack(prompt), bad_words=[*bad_words])
        sequence = Sequence(request, self.eos_token_ids)
        self.scheduler.add(sequence)
        return sequence

    def run(self, between_steps: Callable[[], None] = lambda: None) -> None:
        """Step until every request has ended, as a worker does. `between_steps` may disturb."""
        steps = self._steps
        while True:
            between_steps()
            self._compile_grammars()
            while plan := self.scheduler.schedule():
                decoded = PLANS.decode(msgspec.msgpack.encode(plan))
                steps.append(self.runner.launch(decoded))
            if not steps:
                return
            number = self.scheduler.in_flight[0].number
            step = steps.pop(0)
            token_ids = pack(step.token_ids())
            self.scheduler.update(SampledTokens(0, number, token_ids, *step.output()))

    def lose_workers(self) -> None:
        """Lose the results of the plans in flight, as if the worker had died. Its memory remains.

        The next worker continues with the memory; the caller tells the scheduler.
        """
        self._steps.clear()
        self.runner.clear()

    def _compile_grammars(self) -> None:
        """Compile the grammars that the scheduler asks for, and wait until all are compiled."""
        compiled: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        while message := self.scheduler.next_grammars():
            grammars = self.runner.logits_processor.grammars
            assert grammars
            grammars.forget(message.removed)
            for number, spec in message.added:
                grammars.compile(number, spec, lambda *result: compiled.put(result))
                result = GrammarCompiled(message.epoch, number, *compiled.get(timeout=60))
                assert self.scheduler.on_compiled(result) == []
