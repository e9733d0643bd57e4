"""Requests made from `/openapi.json`, good and bad: no answer is a 500, and nobody dies.

`PENSTOCK_SEARCH=100 pytest --timeout 3000 tests/pipeline/test_http_fuzz.py` sends more.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import hypothesis
import pytest

from tests.pipeline import odd_numbers
from tests.pipeline.conftest import Pipeline
from tests.pipeline.ports import free_port
from tests.search import FACTOR, scaled

pytestmark = pytest.mark.pipeline
NUM_EXAMPLES = scaled(5)
NUM_NUMBERS = scaled(300)
SECONDS = 60.0


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline]) -> tuple[Pipeline, str]:
    """With limits that let no answer take long."""
    port = free_port()
    limits = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-waiting-requests", "4")
    one = pipeline("--http", "1", "--http-port", str(port), *limits)
    return one, f"http://127.0.0.1:{port}"


@pytest.mark.search
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_no_request_is_a_server_error(served: tuple[Pipeline, str], kind: str) -> None:
    import schemathesis  # takes long: only the process that runs this pays
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode

    pipeline, url = served
    mode = GenerationMode(kind)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if kind == "negative" and not operation.body:
            continue  # nothing can be wrong with it

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
            derandomize=FACTOR <= 1,
        )
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=SECONDS)

        ask()
    assert not any(pipeline.restarts().values())


@pytest.mark.search
def test_odd_numbers(served: tuple[Pipeline, str]) -> None:
    """Send denormal, huge, negative and false numbers in every numeric field of every route."""
    pipeline, url = served
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        bodies = list(odd_numbers.requests(client.get("/openapi.json").json()))
        some = random.Random(1).sample(bodies, min(NUM_NUMBERS, len(bodies)))
        some += [one for one in bodies if b'"repetition_penalty": 1e-4' in one[1]]

        def send(one: tuple[str, bytes]) -> str:
            route, body = one
            response = client.post(route, content=body)
            if response.status_code < 500:
                return ""
            return f"{route} {body[:200]!r}: {response.status_code} {response.text}"

        with ThreadPoolExecutor(2) as threads:
            assert not [problem for problem in threads.map(send, some) if problem]
    assert not any(pipeline.restarts().values())
