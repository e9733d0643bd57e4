"""Results of rows with `pooling`: embeddings, and probabilities of labels.

Hidden states and logits are copied to the host, which computes each row by itself in the same way:
a result has the same bits in every batch.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.layouts.step import COUNT, FIRST
from penstock.models.qwen3 import Qwen3
from penstock.protocol.messages.sampling import MAX_LABELS, Pooling
from penstock.services.worker.step.cuda_graphs import Computed
from penstock.services.worker.step.launched_step import integers_to_device, to_host
from penstock.services.worker.step.step_output import PendingNumbers, PooledNumbers
from penstock.services.worker.step.step_record import Rows

MAX_ROWS = 64  # rows whose logits are copied at a time, which bounds the memory


def pool(
    model: Qwen3, poolings: Mapping[int, Pooling], rows: Rows, computed: Computed
) -> Iterable[PendingNumbers]:
    """Yield what waits for the results of some rows; poolings: by index among the sampled rows.

    Every rank has to call this; rank 0 gets results.
    """
    embedded = {index: one for index, one in poolings.items() if not one.label_ids}
    if embedded and model.tp.rank == 0:
        table = rows.table[rows.sampled[list(embedded)]]
        ends = table[:, FIRST] + table[:, COUNT]
        (last,) = integers_to_device((ends - 1,), computed.tokens.device)
        states = to_host(computed.hidden_states[last].float())
        norm = model.model.norm
        yield partial(_embeddings, embedded, states, to_host(norm.weight.float()), norm.eps)
    labelled = [(index, one) for index, one in poolings.items() if one.label_ids]
    for begin in range(0, len(labelled), MAX_ROWS):
        some = dict(labelled[begin : begin + MAX_ROWS])
        yield from _logits_of_labels(model, some, rows, computed)


def _logits_of_labels(
    model: Qwen3, poolings: Mapping[int, Pooling], rows: Rows, computed: Computed
) -> Iterable[PendingNumbers]:
    label_ids = np.zeros((len(poolings), MAX_LABELS), np.int64)
    for row, pooling in zip(label_ids, poolings.values(), strict=True):
        row[: len(pooling.label_ids)] = pooling.label_ids
    order, ids = integers_to_device(
        (rows.sampled[list(poolings)], label_ids.ravel()), computed.tokens.device
    )
    logits = model.head.join(computed.logits[order])
    if logits is not None:
        chosen = logits.gather(1, ids.view(-1, MAX_LABELS))
        yield partial(_probabilities, poolings, to_host(chosen))


def _embeddings(
    poolings: Mapping[int, Pooling], states: Tensor, weight: Tensor, eps: float
) -> PooledNumbers:
    """Return the first `dimensions` of the norm of each hidden state, scaled to length 1."""
    for (index, pooling), state in zip(poolings.items(), states.numpy(), strict=True):
        square: np.float64 = np.square(state, dtype=np.float64).mean()
        normed = state / np.sqrt(square + eps) * weight.numpy()
        kept = normed[: pooling.dimensions]
        yield index, _packed(kept / np.linalg.norm(kept))


def _probabilities(poolings: Mapping[int, Pooling], logits: Tensor) -> PooledNumbers:
    """Return the softmax over the logits of each row's labels."""
    for (index, pooling), row in zip(poolings.items(), logits.numpy(), strict=True):
        kept = row[: len(pooling.label_ids)].astype(np.float64)
        shares = np.exp(kept - kept.max())
        yield index, _packed(shares / shares.sum())


def _packed(numbers: NDArray[np.floating]) -> bytes | None:
    """Return numbers as float32, or None where they are not finite."""
    return numbers.astype("<f4").tobytes() if np.isfinite(numbers).all() else None
