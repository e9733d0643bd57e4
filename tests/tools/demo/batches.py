"""Endless training batches, made by background processes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.tools.demo.dialogues import IGNORED, SHORT_ROOM, Dialogue, random_dialogue
from tests.tools.demo.tasks import MAX_COUNTED, Sizes, TaskName, make_example
from tests.tools.demo.tokenizer import END_OF_TEXT_ID


@dataclass(frozen=True)
class Share:
    """Weight of a task in a batch, its sizes, and the room for a history."""

    weight: int
    task: TaskName
    sizes: Sizes
    room: int = SHORT_ROOM


@dataclass(frozen=True)
class Bucket:
    """Batches of one shape: dialogues of similar length, so that little of it is padding."""

    num_tokens: int
    num_rows: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Batch:
    """Inputs and next-token targets of each position.

    Kept as 16-bit integers: batches travel between processes in shared memory.
    """

    token_ids: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device, as the 64-bit integers that torch indexes with."""
        token_ids = self.token_ids.to(device, non_blocking=True)
        targets = self.targets.to(device, non_blocking=True)
        return Batch(token_ids.long(), targets.long())


_NO_SIZE = Sizes(1, 1)
# Sizes go a little beyond what is promised, so that nothing promised lies at the edge.
_REVERSED = Sizes(1, 30)

# One step trains on one batch of each: every task is in every step.
BUCKETS = (
    Bucket(
        num_tokens=64,
        num_rows=640,
        shares=(
            Share(55, "sum", _NO_SIZE),
            Share(20, "reverse", _REVERSED),
            Share(15, "count", Sizes(1, 12)),
            Share(10, "repeat", Sizes(1, 24)),
        ),
    ),
    Bucket(
        num_tokens=256,
        num_rows=112,
        shares=(
            Share(10, "sum", _NO_SIZE),
            Share(35, "reverse", _REVERSED),
            Share(15, "count", Sizes(1, 50)),
            Share(40, "repeat", Sizes(1, 100)),
        ),
    ),
    Bucket(
        num_tokens=640,
        num_rows=48,
        shares=(
            Share(3, "sum", _NO_SIZE),
            Share(5, "reverse", _REVERSED),
            Share(5, "count", Sizes(1, 120)),
            Share(87, "repeat", Sizes(60, 220)),
        ),
    ),
    Bucket(
        num_tokens=2048,
        num_rows=12,
        shares=(
            Share(20, "sum", _NO_SIZE, room=1500),
            Share(20, "reverse", _REVERSED, room=1500),
            Share(20, "count", Sizes(1, 100), room=1500),
            Share(40, "repeat", Sizes(1, 220), room=1500),
        ),
    ),
    Bucket(
        num_tokens=4096,
        num_rows=8,
        shares=(
            Share(45, "count", Sizes(100, 500)),
            Share(30, "count", Sizes(500, MAX_COUNTED)),
            Share(5, "sum", _NO_SIZE, room=3500),
            Share(5, "reverse", _REVERSED, room=3500),
            Share(5, "count", Sizes(1, 100), room=3500),
            Share(10, "repeat", Sizes(1, 220), room=3500),
        ),
    ),
)


def buckets_of(num_tokens: int) -> tuple[Bucket, ...]:
    """Return the buckets with this number of tokens in each batch."""
    return tuple(
        replace(bucket, num_rows=max(1, num_tokens // bucket.num_tokens)) for bucket in BUCKETS
    )


def draw_batch(rng: random.Random, bucket: Bucket) -> Batch:
    """Return a bucket's batch of random training dialogues."""
    fitting = (dialogue for dialogue in _dialogues(rng, bucket) if _fits(dialogue, bucket))
    return collate(list(islice(fitting, bucket.num_rows)), bucket.num_tokens)


def collate(dialogues: list[Dialogue], num_tokens: int) -> Batch:
    """Return dialogues as one batch, padded at their ends.

    Attention is causal, so padding after a dialogue needs no mask.
    """
    shape = (len(dialogues), num_tokens)
    token_ids = torch.full(shape, END_OF_TEXT_ID, dtype=torch.int16)
    targets = torch.full(shape, IGNORED, dtype=torch.int16)
    for row, dialogue in enumerate(dialogues):
        length = len(dialogue.token_ids) - 1
        token_ids[row, :length] = torch.tensor(dialogue.token_ids[:-1], dtype=torch.int16)
        targets[row, :length] = torch.tensor(dialogue.labels[1:], dtype=torch.int16)
    return Batch(token_ids, targets)


def training_batches(
    seed: int, num_workers: int, buckets: tuple[Bucket, ...] = BUCKETS
) -> Iterator[list[Batch]]:
    """Yield one batch of each bucket a step, without end."""
    loader: DataLoader[list[Batch]] = DataLoader(
        _Steps(seed, buckets),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=3 if num_workers else None,
    )
    yield from loader


class _Steps(IterableDataset[list[Batch]]):
    """The endless series of one worker process."""

    def __init__(self, seed: int, buckets: tuple[Bucket, ...]) -> None:
        self._seed, self._buckets = seed, buckets

    def __iter__(self) -> Iterator[list[Batch]]:
        worker = get_worker_info()
        rng = random.Random(f"{self._seed}/{worker.id if worker else 0}")
        while True:
            yield [draw_batch(rng, bucket) for bucket in self._buckets]


def _dialogues(rng: random.Random, bucket: Bucket) -> Iterator[Dialogue]:
    weights = [share.weight for share in bucket.shares]
    while True:
        share = rng.choices(bucket.shares, weights)[0]
        yield random_dialogue(rng, make_example(rng, share.task, share.sizes), share.room)


def _fits(dialogue: Dialogue, bucket: Bucket) -> bool:
    return len(dialogue.token_ids) <= bucket.num_tokens
