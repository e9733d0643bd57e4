"""Requests made from `/openapi.json`, good and bad: no answer is a 500, and nobody dies.

`PENSTOCK_SEARCH=100 pytest --timeout 3000 tests/pipeline/test_http_fuzz.py` sends more.
"""

from collections.abc import Callable

import hypothesis
import pytest

from tests.pipeline.conftest import Pipeline
from tests.pipeline.ports import free_port
from tests.search import scaled

pytestmark = pytest.mark.pipeline
NUM_EXAMPLES = scaled(5)
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
            derandomize=scaled(1) == 1,
        )
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=SECONDS)

        ask()
    assert not any(pipeline.restarts().values())
