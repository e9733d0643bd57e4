"""Sampling from logits that are cut between ranks: here, buffers of one process on one device."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import shard_size
from penstock.kernels.sampling import reference
from penstock.kernels.sampling.triton_sampling import ShardedSampler, buffer_size
from tests.kernels.conftest import on_gpu
from tests.kernels.sampling import test_triton_sampling as whole
from tests.kernels.sampling.slot_table import slot_table


def samplers_of(
    device: str, num_ranks: int, max_rows: int, vocab_size: int
) -> list[ShardedSampler]:
    """Each with a buffer that holds what no kernel may read."""
    size = buffer_size(max_rows, vocab_size, num_ranks)
    buffers = [torch.full((size,), torch.nan, device=device) for _ in range(num_ranks)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    return [
        ShardedSampler(buffer, addresses, rank, max_rows, vocab_size)
        for rank, buffer in enumerate(buffers)
    ]


def draw(
    samplers: list[ShardedSampler],
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    parameters: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the tokens that `sample` returns and writes to last_token, on all ranks."""
    shard = shard_size(logits.shape[1], len(samplers))
    tokens: list[Tensor] = []
    last_tokens: list[Tensor] = []

    def run(rank: int) -> None:
        """Run the next rank in place of the barrier after a rank's scan."""
        if rank == len(samplers):
            return
        own = logits[:, rank * shard : (rank + 1) * shard]
        # What pads the vocabulary would win.
        samplers[rank].logits(len(logits)).fill_(torch.inf)[:, : own.shape[1]] = own
        last_tokens.append(torch.full((len(parameters["seed"]),), -1, device=logits.device))
        tokens.append(
            samplers[rank].sample(
                lambda: run(rank + 1),
                slots,
                positions,
                slot_table(**parameters, last_token=last_tokens[rank]),
            )
        )

    # A rank's tokens follow those of the ranks that it waits for.
    run(0)
    for ranks in tokens, last_tokens:
        assert len(ranks) == len(samplers)
        assert all(torch.equal(ranks[0], other) for other in ranks)
    return tokens[0].cpu(), last_tokens[0].cpu()


def cases(device: str, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Logits, slots, positions and parameters of rows of all kinds, and a padded one."""
    # Of the last kind, most winners are dropped once.
    kinds = [*(whole.FEW_KINDS if device == "cpu" else whole.KINDS * 3), (1.5, 0, 0.3, 0.0)]
    parameters = whole.parameters_of(kinds)
    slots = torch.cat([torch.randperm(len(kinds)), torch.tensor([-1])])
    positions = torch.randint(0, 40000, (len(slots),))
    widths = torch.tensor([1.0, 3.0, 0.2, 2.0])[torch.arange(len(slots)) % 4]
    logits = torch.randn(len(slots), vocab_size) * widths[:, None]
    # The greedy row: of equal scores the lowest id wins, in every part of the vocabulary.
    logits[slots == 0] = logits[slots == 0].clamp(max=0)
    on_device = {name: values.to(device) for name, values in parameters.items()}
    logits[4, vocab_size - 1], logits[5, 3] = torch.nan, torch.inf  # they get no token
    return logits.to(device), slots.to(device), positions.to(device), on_device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "num_ranks"),
    [
        (262, 3),
        (5000, 2),
        (13000, 3),  # the last rank has no run
        *[on_gpu(vocab_size, n) for vocab_size in (37984, 151936) for n in (1, 2, 3, 4, 8)],
    ],
)
def test_draws_the_tokens_of_one_rank(device: str, vocab_size: int, num_ranks: int) -> None:
    logits, slots, positions, parameters = cases(device, vocab_size)
    samplers = samplers_of(device, num_ranks, len(slots) + 3, vocab_size)
    tokens, last_token = draw(samplers, logits, slots, positions, parameters)
    alone, last_alone = whole.draw(
        device, logits, slots, positions, {name: value.cpu() for name, value in parameters.items()}
    )
    assert torch.equal(tokens, alone)
    assert torch.equal(last_token, last_alone)
    expected_last = torch.full_like(last_token, -1)
    rows = (tensor.cpu() for tensor in (logits, slots, positions))
    by_slot = {name: values.cpu() for name, values in parameters.items()}
    expected = reference.sample(*rows, slot_table(**by_slot, last_token=expected_last))
    # Sums and logarithms of the reference round differently: a row in many may be between.
    assert (tokens != expected).sum() <= len(slots) // 40


def test_parts_of_the_vocabulary_are_whole_runs() -> None:
    assert [shard_size(151936, n) // 4096 for n in (1, 2, 4, 8)] == [38, 19, 10, 5]
    assert shard_size(262, 8) == shard_size(4096, 1) == 4096


def test_refuses_what_does_not_fit() -> None:
    size = buffer_size(2, 5000, 2)
    buffer = torch.zeros(size)
    with pytest.raises(ValueError, match=rf"buffer: got .*, expected torch.float32 \[{size}\]"):
        ShardedSampler(buffer[1:], [0, 16], 0, 2, 5000)
    with pytest.raises(ValueError, match="addresses: got 0x18, expected a multiple of 16"):
        ShardedSampler(buffer, [0, 24], 0, 2, 5000)
    sampler = ShardedSampler(buffer, [0, 16], 0, 2, 5000)
    _, slots, positions, parameters = cases("cpu", 5000)
    assert sampler.logits(1).shape == (1, 4096)
    by_slot = slot_table(**parameters, last_token=torch.full_like(parameters["seed"], -1))
    with pytest.raises(ValueError, match="slots: got 3 rows, expected at most 2"):
        sampler.sample(int, slots[:3], positions[:3], by_slot)
    none = sampler.sample(int, slots[:0], positions[:0], by_slot)
    assert none.shape == (0,)
