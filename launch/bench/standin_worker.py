"""A worker without a model, for `launch bench`; steps take no time or a given time.

It follows plans like a real worker, as far as needed to know the number of sampled tokens of a
step. Only the pipeline around it is then measured.
"""

import sys
import time

import zmq

from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.worker import ToWorker, WorkerAssignment, WorkerExit, WorkerState
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process

TOKEN_ID = 65
WAKE_SECONDS = 0.001  # seconds by which a sleep may end late without making the steps longer
NUM_BLOCKS = 1 << 16
BLOCK_SIZE = 16


class StandInWorker:
    """Worker that counts the remaining prefill tokens of each row."""

    def __init__(self, process: Process, step_seconds: float = 0.0) -> None:
        self.step_seconds, self.step_end = step_seconds, 0.0
        self.state = WorkerState(process.name)
        self.num_left: dict[int, int] = {}
        self.epoch = -1
        self.plans = process.context.connect(
            zmq.DEALER, process.endpoints.workers, ToWorker, process.identity
        )
        self.loop = EventLoop(process.context, self.send_state, HeartbeatThread(process))
        self.loop.add(self.plans, self.on_messages)

    def send_state(self) -> None:
        """Send the worker's state, which also serves as heartbeat."""
        self.plans.send(self.state)

    def on_messages(self) -> None:
        """Handle plans and group assignments."""
        for _, message in self.plans.receive():
            match message:
                case BatchPlan():
                    tokens = self.sample(message)
                    if self.num_left:  # a real worker computes nothing for a plan without rows
                        self.compute()
                    if self.state.rank == 0:
                        self.plans.send(tokens)
                case WorkerAssignment() if message.epoch > self.epoch:
                    self.epoch = message.epoch
                    self.state = WorkerState(
                        self.state.name, message.group, message.rank, NUM_BLOCKS, BLOCK_SIZE
                    )
                    self.num_left.clear()
                    self.send_state()
                case WorkerExit(reason):
                    raise SystemExit(reason)

    def compute(self) -> None:
        """Take the time of a step, from the end of the previous step if the plan came by then."""
        self.step_end = max(self.step_end, time.monotonic() - WAKE_SECONDS) + self.step_seconds
        time.sleep(max(0.0, self.step_end - time.monotonic()))

    def sample(self, plan: BatchPlan) -> SampledTokens:
        """Return a token for each row without remaining prefill tokens."""
        for slot in unpack(plan.removed):
            del self.num_left[slot]
        for row in plan.added:
            num_tokens = row.num_skipped + len(row.token_ids) // 4
            self.num_left[row.slot] = num_tokens - row.num_computed_tokens
        chunks = unpack(plan.chunks)
        for slot, num_tokens in zip(chunks[::2], chunks[1::2], strict=True):
            self.num_left[slot] -= num_tokens
        num_sampled = sum(left == 0 for left in self.num_left.values())
        return SampledTokens(plan.epoch, plan.step, pack([TOKEN_ID] * num_sampled))


def main() -> None:
    """Run until SIGTERM; the argument is the milliseconds of a step."""
    process = Process("worker")
    StandInWorker(process, float(sys.argv[1]) / 1e3 if sys.argv[1:] else 0.0).loop.run()
    process.context.destroy()


if __name__ == "__main__":
    main()
