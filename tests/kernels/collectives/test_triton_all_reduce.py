"""The all-reduce that pushes. Its ranks are here streams of one GPU; without one, a single rank."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.triton_collectives import PushAllReduce, inbox_size

BLOCK = 1024
"""elements of a program"""
MAX_ELEMENTS = 3 * BLOCK - 10
SIZES = [2 * BLOCK + 38, 4, MAX_ELEMENTS, 2, 2 * BLOCK, 2 * BLOCK, MAX_ELEMENTS, 8]
"""of messages"""
NEGATIVE_ZEROS = torch.full((2,), -0.0).bfloat16().view(torch.int32).item()
"""a word that is not sent"""


def ranks_of(device: str, num_ranks: int) -> tuple[list[PushAllReduce], list[Tensor]]:
    """And their inboxes, [3 turns, num_ranks senders, words]."""
    size = inbox_size(MAX_ELEMENTS, num_ranks)
    inboxes = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(num_ranks)]
    addresses = [inbox.data_ptr() for inbox in inboxes]
    ranks = [
        PushAllReduce(inbox, addresses, rank, MAX_ELEMENTS) for rank, inbox in enumerate(inboxes)
    ]
    return ranks, [inbox.view(3, num_ranks, -1) for inbox in inboxes]


def messages_of(
    num_ranks: int, sizes: list[int], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Return the messages of each call, [num_ranks, size], whose sums are exact."""
    messages = [torch.randint(-50, 50, (num_ranks, size)).to(dtype) for size in sizes]
    for message in messages:
        message[:, :2] = -0.0
    return messages


@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(2, torch.bfloat16), (4, torch.bfloat16), (2, torch.float16)]
)
def test_sends_to_all_adds_what_has_come_and_empties_what_was_read(
    num_ranks: int, dtype: torch.dtype
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    # The interpreter runs one rank at a time: here, rank 1. The others are a call ahead.
    ranks, inboxes = ranks_of("cpu", num_ranks)
    messages = messages_of(num_ranks, SIZES, dtype)
    calls = [
        [sum(size > n * BLOCK for size in SIZES[:call]) for n in range(3)] for call in range(9)
    ]

    def words(call: int, program: int) -> tuple[int, slice, slice]:
        """Return the place of a program's words: turn, place in the inbox, in the message."""
        begin, end = (min(n * BLOCK, SIZES[call]) // 2 for n in (program, program + 1))
        place = slice(program * BLOCK // 2, program * BLOCK // 2 + end - begin)
        return calls[call][program] % 3, place, slice(begin, end)

    def send(call: int) -> None:
        for sender in {*range(num_ranks)} - {1}:
            sent = messages[call][sender].view(torch.int32)
            for program in range(3):
                turn, place, part = words(call, program)
                inboxes[1][turn, sender, place] = sent[part].masked_fill(
                    sent[part] == NEGATIVE_ZEROS, 0
                )

    send(0)
    for call, message in enumerate(messages):
        if call + 1 < len(messages):
            send(call + 1)
        x = message[1].clone()
        residual = torch.randint(-50, 50, x.shape).to(dtype) if call % 2 else None
        total = message.float().sum(0) + (0 if residual is None else residual.float())
        assert torch.equal(ranks[1](x, residual), total.to(dtype))
        sent = message[1].view(torch.int32).clone()
        sent[0] = 0
        for program in range(3):
            turn, place, part = words(call, program)
            assert all(torch.equal(inbox[turn, 1, place], sent[part]) for inbox in inboxes)
            if place.stop > place.start:
                whole = slice(program * BLOCK // 2, (program + 1) * BLOCK // 2)
                assert (inboxes[1][(turn + 2) % 3, :, whole] == NEGATIVE_ZEROS).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ranks_get_the_sum(num_ranks: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("ranks must run at the same time")
    ranks, _ = ranks_of("cuda", num_ranks)
    sizes = SIZES * 20
    messages = [torch.randn(num_ranks, size).to(dtype) for size in sizes]
    # Each part is aligned alike, so that no rank's kernel is loaded while another one waits for it.
    on_gpu = [[part.cuda() for part in message] for message in messages]
    streams = [torch.cuda.Stream() for _ in ranks]
    torch.cuda.synchronize()
    residuals = [
        torch.randn(size).to(dtype).cuda() if n % 2 else None for n, size in enumerate(sizes)
    ]
    for parts, residual in zip(on_gpu, residuals, strict=True):
        for rank, part, stream in zip(ranks, parts, streams, strict=True):
            with torch.cuda.stream(stream):
                rank(part, residual)
    torch.cuda.synchronize()
    for message, parts, residual in zip(messages, on_gpu, residuals, strict=True):
        total = message[0].float()
        for part in message[1:]:
            total += part.float()
        if residual is not None:
            total += residual.cpu().float()
        assert all(torch.equal(part.cpu(), total.to(dtype)) for part in parts)


def test_refuses_what_does_not_fit() -> None:
    (rank, _), _ = ranks_of("cpu", 2)
    with pytest.raises(
        ValueError, match=f"got 4096 elements, expected an even number up to {MAX_ELEMENTS}"
    ):
        rank(torch.zeros(4096).bfloat16())
    with pytest.raises(ValueError, match="3 elements"):
        rank(torch.zeros(3).bfloat16())
    with pytest.raises(ValueError, match="x: got dtype"):
        rank(torch.zeros(4))
    with pytest.raises(ValueError, match=r"residual: got shape \[6\], expected \[4\]"):
        rank(torch.zeros(4).bfloat16(), torch.zeros(6).bfloat16())
