"""Scheduler and model runner in one process, joined by encoded plans: no sockets."""

from collections.abc import Callable

import msgspec

from penstock.protocol.checkpoint import (
    eos_token_ids,
    read_generation_config,
    read_model_config,
)
from penstock.protocol.config import Config
from penstock.protocol.messages import TokenizedRequest, WorkerAssignment
from penstock.protocol.plan import BatchPlan, pack
from penstock.protocol.sampling import SamplingParams
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.block_pool import BlockPool
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import Sequence
from penstock.services.worker.loading import load

PLANS = msgspec.msgpack.Decoder(BatchPlan)


class Engine:
    """What one pipeline with `tp` 1 computes."""

    def __init__(self, config: Config) -> None:
        self.model = read_model_config(config.model_folder)
        self.runner = load(config, WorkerAssignment(1, "g", 0, 1, ""), lambda: None)
        blocks = BlockManager(
            BlockPool(self.runner.num_blocks),
            self.runner.block_size,
            int(self.runner.num_blocks * config.watermark),
            config.enable_prefix_caching,
        )
        max_model_len = config.max_model_len or self.model.max_position_embeddings
        self.scheduler = Scheduler(config, max_model_len, blocks)
        generation = read_generation_config(config.model_folder)
        self.eos_token_ids = frozenset(eos_token_ids(self.model, generation))

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """Puts a request into the queue."""
        request = TokenizedRequest(request_id, 0, sampling, pack(prompt))
        sequence = Sequence(request, self.eos_token_ids)
        self.scheduler.add(sequence)
        return sequence

    def run(self, between_steps: Callable[[], None] = lambda: None) -> None:
        """Steps until every request has ended. `between_steps` may disturb."""
        results: list[list[int]] = []
        while True:
            between_steps()
            while plan := self.scheduler.schedule():
                decoded = PLANS.decode(msgspec.msgpack.encode(plan))
                results.append(self.runner.launch(decoded).token_ids())
            if not results:
                return
            self.scheduler.update(self.scheduler.in_flight[0].number, results.pop(0))
