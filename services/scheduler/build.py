"""The scheduler of a group of workers that is ready."""

from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.config import Config
from penstock.services.scheduler.block_manager import make_block_manager
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.workers import WorkerGroup


def make_scheduler(config: Config, model: ModelConfig, group: WorkerGroup) -> Scheduler:
    """Return one with as many blocks as every worker has."""
    blocks = make_block_manager(config, group.num_blocks, group.block_size)
    return Scheduler(config, model.context(config.max_model_len), blocks, group.epoch)
