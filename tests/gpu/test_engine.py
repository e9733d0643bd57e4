"""The demo model on a GPU: every answer right, whatever batching, caching and back ends do."""

import gc
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from tests.engine import Engine
from tests.tools.demo.tasks import Example, Sizes, TaskName, is_right, make_example

pytestmark = pytest.mark.gpu
DEMO = Config().model_folder
TASKS: dict[TaskName, Sizes] = {
    "sum": Sizes(1, 1),
    "count": Sizes(10, 90),
    "reverse": Sizes(3, 20),
    "repeat": Sizes(5, 60),
}
Answers = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """256 tasks with short and long answers."""
    rng = Random(5)
    kinds = list(TASKS)
    return [make_example(rng, kinds[n % 4], TASKS[kinds[n % 4]]) for n in range(256)]


def answer(
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    *,
    preempt: bool = False,
    temperature: float = 0.0,
    **options: object,
) -> Answers:
    """Token ids of the answers to all examples, asked at once as chats that begin alike."""
    engine = Engine(Config(**{"device": "cuda", "kv_cache_gib": 1.0, **options}))  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=temperature, top_k=20, top_p=0.95, max_tokens=400)
    rules = {"role": "system", "content": "Be brief and right. " * 14}
    sequences = []
    for number, example in enumerate(examples):
        messages = [rules, {"role": "user", "content": example.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        sequences.append(engine.add(str(number), list(tokenizer.encode(text)), sampling))

    def disturb() -> None:
        for sequence in list(engine.scheduler.running):
            if sequence.num_preemptions < 2 < len(sequence.output_token_ids):
                engine.scheduler.preempt(sequence)

    engine.run(disturb if preempt else lambda: None)
    return [sequence.output_token_ids for sequence in sequences]


def num_wrong(tokenizer: PreTrainedTokenizerFast, examples: list[Example], answers: Answers) -> int:
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    return sum(not is_right(e.prompt, t) for e, t in zip(examples, texts, strict=True))


@pytest.fixture(scope="module")
def expected(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> Answers:
    """Return the answers with the default options; all are right."""
    answers = answer(tokenizer, examples)
    assert num_wrong(tokenizer, examples, answers) == 0
    return answers


@pytest.mark.parametrize("batch", [1, 2, 16, 64])
def test_every_batch_is_answered_right(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example], expected: Answers, batch: int
) -> None:
    some = examples[:batch] if batch > 1 else examples[1:2]
    answers = answer(tokenizer, some, max_num_seqs=batch)
    assert answers == (expected[:batch] if batch > 1 else expected[1:2])


@pytest.mark.parametrize(
    "options",
    [
        {"enable_cuda_graphs": False},
        {"enable_prefix_caching": False},
        {"block_size": 16},
        {"block_size": 64},
        {"block_size": 256},
        {"block_size": 48},
        {"attention": "triton"},
        {"attention": "flash-attn"},
        {"attention": "torch", "block_size": 16},
        {"max_num_batched_tokens": 100, "max_num_seqs": 32},
        {"max_num_batched_tokens": 100, "max_num_seqs": 32, "attention": "triton"},
        {"num_plans_in_flight": 1},
        {"num_blocks": 300, "block_size": 16},
        {"preempt": True, "num_blocks": 300, "block_size": 16, "max_num_seqs": 64},
    ],
    ids=str,
)
def test_options_change_no_answer(
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    expected: Answers,
    options: dict[str, object],
) -> None:
    if options.get("attention") == "flash-attn":
        pytest.importorskip("flash_attn")
    answers = answer(tokenizer, examples, **options)  # type: ignore[arg-type]
    assert num_wrong(tokenizer, examples, answers) == 0
    assert answers == expected


@pytest.mark.parametrize("options", [{}, {"block_size": 48, "enable_cuda_graphs": False}], ids=str)
def test_8_bits_of_keys_and_values_answer_nearly_all(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example], options: dict[str, object]
) -> None:
    answers = answer(tokenizer, examples, kv_cache_dtype="fp8", **options)  # type: ignore[arg-type]
    assert num_wrong(tokenizer, examples, answers) <= len(examples) // 50


def test_graphs_and_eager_steps_sample_the_same(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    """Batches of exactly a graph's size, so that both run the same kernels on the same shapes."""
    some = examples[:16]
    options = {"max_num_seqs": 16, "temperature": 1.5}
    eager = answer(tokenizer, some, enable_cuda_graphs=False, **options)  # type: ignore[arg-type]
    graphs = answer(tokenizer, some, **options)  # type: ignore[arg-type]
    assert graphs == eager
    assert len({tuple(ids) for ids in graphs}) > 10


def test_nothing_is_left_on_the_gpu(
    tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> None:
    before = reserved()
    answer(tokenizer, examples[:4], max_num_seqs=4)
    assert reserved() - before < 64 << 20


def reserved() -> int:
    """Return the bytes that live objects keep on the GPU: a runner and its graphs are a cycle."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
