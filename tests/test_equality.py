"""The same tokens as `transformers`, whatever batching, caching, chunking and preemption do.

Greedy requests of mixed lengths are sent at once, with a fifth as many that sample. Greedy tokens
are compared with the argmax of `Qwen3ForCausalLM`'s logits (float32) after the same tokens: by
induction, with the output of its greedy `generate`. Sampled tokens are the same with every option:
the noise is a function of seed, position and token, and the CPU's logits are the same to the bit.
"""

from random import Random
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from tests.engine import Engine
from tests.search import scaled
from tests.tools.demo.tasks import TASK_NAMES, Sizes, make_example

NUM_GREEDY = scaled(25)
NUM_SAMPLED = scaled(5)
MAX_TOKENS = 24
pytestmark = pytest.mark.search
DEMO = Config().model_folder


class Output(NamedTuple):
    """Result of one request."""

    token_ids: list[int]
    finish_reason: str | None
    num_preemptions: int


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Plain prompts of 6 tokens and more, and chats of up to 400; some chats begin alike."""
    rng = Random(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
    prompts = []
    for number in range(NUM_GREEDY + NUM_SAMPLED):
        example = make_example(rng, TASK_NAMES[number % 4], Sizes(3, 12))
        text = example.prompt
        if number % 3:
            rules = "Be brief and right. " * (5 if number % 3 == 1 else rng.randrange(1, 16))
            messages = [{"role": "system", "content": rules}, {"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        prompts.append(list(tokenizer.encode(text)))
    return prompts


def outputs_of(prompts: list[list[int]], preempt: bool = False, **options: object) -> list[Output]:
    """Run all prompts at once; with `preempt`, each is preempted after two of its tokens."""
    engine = Engine(Config(device="cpu", num_threads=1, **options))  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    sampled = SamplingParams(temperature=2, top_p=0.999, max_tokens=MAX_TOKENS, ignore_eos=True)
    sequences = [
        engine.add(str(n), prompt, greedy if n < NUM_GREEDY else sampled)
        for n, prompt in enumerate(prompts)
    ]

    def disturb() -> None:
        for sequence in list(engine.scheduler.running):
            num_preemptions = sequence.num_preemptions
            if num_preemptions < 2 and len(sequence.output_token_ids) > num_preemptions:
                engine.scheduler.preempt(sequence)

    engine.run(disturb if preempt else lambda: None)
    blocks = engine.scheduler.block_manager
    assert blocks.pool.num_free_blocks == blocks.pool.num_blocks
    return [Output(s.output_token_ids, s.finish_reason, s.num_preemptions) for s in sequences]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[Output]:
    """Return outputs with the default options, checked against `transformers`."""
    outputs = outputs_of(prompts)
    model = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    eos_token_ids = set(model.generation_config.eos_token_id)
    greedy = list(zip(prompts, outputs, strict=True))[:NUM_GREEDY]
    for prompt, (token_ids, reason, _) in greedy:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + token_ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids
        ends = [token_id in eos_token_ids for token_id in token_ids]
        assert not any(ends[:-1])
        assert reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(token_ids) == MAX_TOKENS
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"block_size": 256},
        {"block_size": 256, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 48, "max_num_seqs": 32},
        {"max_num_batched_tokens": 48, "max_num_seqs": 32, "block_size": 256},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_plans_in_flight": 3},
        {"num_plans_in_flight": 1},
        {"num_blocks": 40},
        {"num_blocks": 40, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_options_change_no_token(
    prompts: list[list[int]], expected: list[Output], options: dict[str, object]
) -> None:
    outputs = outputs_of(prompts, **options)
    assert [output[:2] for output in outputs] == [output[:2] for output in expected]


@pytest.mark.slow
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_changes_no_token(
    prompts: list[list[int]], expected: list[Output], enable_prefix_caching: bool
) -> None:
    """A small pool, and each request that is long enough for it preempted at least twice."""
    options = {"num_blocks": 48, "max_num_batched_tokens": 100, "max_num_seqs": 16}
    outputs = outputs_of(
        prompts, preempt=True, enable_prefix_caching=enable_prefix_caching, **options
    )
    assert [output[:2] for output in outputs] == [output[:2] for output in expected]
    assert all(output.num_preemptions >= 2 for output in outputs if len(output.token_ids) > 4)
