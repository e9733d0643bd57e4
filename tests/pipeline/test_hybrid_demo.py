"""The hybrid demo model, served by its name."""

import pytest

from penstock import LLM, SamplingParams
from tests.tools.demo.tasks import count_prompt, is_right

pytestmark = pytest.mark.pipeline
PROMPTS = [
    "17+25=",
    count_prompt(3, 60),
    "reverse: penstock",
    "repeat: 水压管 is a 👩🏽‍🔬 penstock",
]


def test_it_does_its_tasks() -> None:
    params = SamplingParams(max_tokens=400)
    with LLM("demo-hybrid", device="cpu", num_threads=1, kv_cache_gib=0.1) as llm:
        assert llm.config.model_name == "demo-hybrid"
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs += llm.chat(messages, params, use_tqdm=False)
    for prompt, output in zip(2 * PROMPTS, outputs, strict=True):
        assert is_right(prompt, output.outputs[0].text)
