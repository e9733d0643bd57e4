"""The demo model cut across workers: the same tokens, whatever `--tp` is."""

import pytest

from penstock import LLM, SamplingParams

TASKS = ["count from 3 to 40", "17+25=", "reverse: penstock", "repeat: abcabd", "a b c", "so be it"]
GREEDY = [SamplingParams(max_tokens=80, temperature=0.0) for _ in TASKS]
SEEDED = [
    SamplingParams(
        max_tokens=80,
        temperature=1.2,
        seed=seed,
        top_k=[-1, 20, 5][seed % 3],
        top_p=[1.0, 0.9][seed % 2],
        logprobs=[None, 2][seed % 2],
        presence_penalty=[0.0, 0.5][seed // 3],
        ignore_eos=True,
    )
    for seed in range(len(TASKS))
]


def answers(tp: int, **options: object) -> list[list[int]]:
    """Token ids of all tasks, greedy and then with seeds; most rows run together."""
    with LLM(tensor_parallel_size=tp, **options) as llm:
        outputs = llm.generate(TASKS * 2, GREEDY + SEEDED, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.long
@pytest.mark.pipeline
def test_seeds_give_the_same_tokens_at_four_ranks() -> None:
    small = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.1}
    alone = answers(1, **small)
    assert [len(tokens) for tokens in alone[6:]] == [80] * 6
    assert answers(4, **small) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_gpus_agree(graphs: bool) -> None:
    """In bfloat16 the sums of two halves are rounded otherwise, so that a draw may differ."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    small = {"device": "cuda", "kv_cache_gib": 1.0, "enable_cuda_graphs": graphs}
    alone, together = answers(1, **small), answers(2, **small)
    assert together[:4] == alone[:4]  # tasks that the model has learnt
    first = [tokens[0] for tokens in alone]
    assert sum(a[0] == b for a, b in zip(together, first, strict=True)) >= len(first) - 2
