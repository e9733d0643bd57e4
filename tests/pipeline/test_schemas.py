"""Answers of the demo model under random JSON schemas parse and validate.

`PENSTOCK_SEARCH=10` draws ten times as many.
"""

import json

import pytest
from jsonschema import Draft202012Validator

from penstock import LLM, SamplingParams, StructuredOutputs
from tests.search import scaled
from tests.services.worker.test_schemas import Schemas

pytestmark = pytest.mark.pipeline
NUM_SCHEMAS = scaled(40)
MAX_TOKENS = 300
MAX_SHARE_CUT = 0.1
"""of answers that are not at their end by then, of a model that does not know what JSON is"""
IM_END = 258
CLOSERS = {ord('"'): 30.0, ord("}"): 25.0, ord("]"): 25.0, ord(","): 20.0, IM_END: 30.0}
"""what ends something: without, it stays in loops like `{"":{"":` for ever"""


@pytest.mark.long
@pytest.mark.search
def test_answers_follow_their_schemas() -> None:
    schemas = [Schemas(seed).make() for seed in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputs(json=schema),
            temperature=1.5,
            logit_bias=CLOSERS,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        for seed, schema in enumerate(schemas)
    ]
    with LLM(device="cpu", num_threads=1, kv_cache_gib=0.5, max_model_len=2048) as llm:
        outputs = llm.generate([f"{seed}: " for seed in range(NUM_SCHEMAS)], params, use_tqdm=False)
    num_cut = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason == "stop":
            Draft202012Validator(schema).validate(json.loads(answer.text))
        num_cut += answer.finish_reason == "length"
    assert num_cut <= MAX_SHARE_CUT * NUM_SCHEMAS
