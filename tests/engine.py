"""Scheduler and model runner in one process, joined by encoded plans: no sockets."""

import gc
import queue
import threading
from collections.abc import Callable, Iterable

import msgspec

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import TokenizedRequest
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.worker import (
    CopyBlocks,
    FolderRequest,
    GrammarCompiled,
    WorkerAssignment,
)
from penstock.protocol.tokenizer_file import read_eos_token_ids
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.blocks.offload_index import FolderIndex, OffloadIndex
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import Sequence
from penstock.services.worker.launched_step import LaunchedStep
from penstock.services.worker.loading import load

PLANS = msgspec.msgpack.Decoder(BatchPlan)


class Engine:
    """Scheduler and worker of one pipeline with `tp` 1, in this process, with their tiers."""

    def __init__(self, config: Config) -> None:
        self.config = config
        gc.collect()  # an earlier engine that is freed during a capture may invalidate it
        self.model = read_model_config(config.model_folder)
        self.runner = load(config, WorkerAssignment(1, "g", 0, 1, ""), lambda: None)
        states = self.runner.num_state_blocks and BlockPool(self.runner.num_state_blocks)
        number = self.runner.num_blocks
        blocks = BlockManager(
            BlockPool(number),
            self.runner.block_size,
            int(number * config.watermark),
            config.enable_prefix_caching,
            states or None,
            self.runner.blocks_per_state,
        )
        max_model_len = self.model.context(config.max_model_len)
        self.scheduler = Scheduler(config, max_model_len, blocks)
        self.eos_token_ids = frozenset(read_eos_token_ids(config.model_folder))
        self._steps: list[LaunchedStep] = []
        self.num_files = 0  # reported files
        self._news = threading.Event()
        if (offload := self.runner.offload) and offload.folder:
            offload.folder.notify = self._news.set
            offload.folder.start()
        self.use_tiers()

    def use_tiers(self) -> None:
        """Let the scheduler use empty host slots, and the files of the folder."""
        offload = self.runner.offload
        if not offload:
            return
        if offload.pinning:
            offload.pinning.join()
        per_step = max(1, self.config.max_num_batched_tokens // self.runner.block_size)
        index = OffloadIndex(offload.num_slots, per_step, num_pieces=offload.num_pieces)
        self.scheduler.block_manager.use_offload(index)
        if offload.folder:
            index.use_folder(FolderIndex(self.scheduler.epoch, 1))

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
            self.take_reports()
            while messages := self.scheduler.next_messages():
                for message in messages:
                    self._send(message)
            if not steps and self.scheduler.num_waiting:
                assert self._news.wait(60), "no files came"
                self._news.clear()
                continue
            if not steps:
                return
            number = self.scheduler.in_flight[0].number
            step = steps.pop(0)
            token_ids = pack(step.token_ids())
            self.scheduler.update(SampledTokens(0, number, token_ids, *step.output()))

    def _send(self, message: BatchPlan | CopyBlocks | FolderRequest) -> None:
        """Let the worker work on a message."""
        if isinstance(message, BatchPlan):
            self._steps.append(self.runner.launch(PLANS.decode(msgspec.msgpack.encode(message))))
            return
        assert self.runner.offload
        if isinstance(message, CopyBlocks):
            self.runner.offload.copy(message)
        else:
            self.runner.offload.work(message)

    def take_reports(self) -> None:
        """Tell the scheduler of files."""
        folder = self.runner.offload and self.runner.offload.folder
        while folder and (report := folder.take_report()):
            report.epoch, report.rank = self.scheduler.epoch, 0
            self.num_files += len(report.added)
            self.scheduler.block_manager.on_report(report)

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
