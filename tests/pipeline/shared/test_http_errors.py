"""Over HTTP: what is refused, and how; metrics; curl."""

import contextlib
import json
from http.client import HTTPConnection

import httpx
import openai
import psutil
import pytest

from tests.pipeline.conftest import Pipeline
from tests.pipeline.disturbed.test_leases import wait_for_requests
from tests.pipeline.http_api import BOTH_CLIENTS, COUNT, COUNT_MESSAGES, KEY, Api

pytestmark = pytest.mark.pipeline


@BOTH_CLIENTS
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields(api: Api, stream: bool) -> None:
    for fields, param in (
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"extra_body": {"max_token": 1}}, "max_token"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat(**fields, stream=stream)  # type: ignore[arg-type]
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_within_the_text(api: Api, stream: bool) -> None:
    """Only where its last item begins, it has too many states."""
    items = [{"const": 1}, {"const": 2}, {"type": "string", "pattern": "^(a{1000}){1000}$"}]
    schema = {"type": "array", "prefixItems": items, "minItems": 3}
    with pytest.raises(openai.APIError) as caught:
        list(api.chat(extra_body={"guided_json": schema}, stream=stream))
    assert (caught.value.param, caught.value.type) == ("guided_json", "invalid_request_error")
    assert isinstance(caught.value, openai.BadRequestError) or stream


@pytest.mark.usefixtures("url")
def test_no_process_shows_the_key() -> None:
    """Though it was given on the command line."""
    lines = [one.cmdline() for one in psutil.Process().children(recursive=True)]
    assert any("all" in line for line in lines)
    assert not [line for line in lines if any(KEY in word for word in line)]


def test_a_disconnect_aborts(http: httpx.Client, shared: Pipeline) -> None:
    def aborted() -> int:
        metrics = http.get("/status").json()["metrics"]
        return int(metrics["request_success"].get("abort", 0))

    def wait_for_aborts(number: int) -> None:
        while aborted() < number:
            http.get("/health")  # comes with the scheduler's next report
        assert aborted() == number

    before = aborted()
    body = {"prompt": COUNT, "max_tokens": 4000, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        next(stream.iter_bytes())
    wait_for_aborts(before + 1)
    with contextlib.closing(HTTPConnection(str(http.base_url.host), http.base_url.port)) as waiting:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        waiting.request("POST", "/v1/completions", json.dumps(body), headers)
        wait_for_requests(shared, 1)
    wait_for_aborts(before + 2)


def test_tokenize(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "née"}).json()
    assert tokens == {"count": 4, "max_model_len": 4096, "tokens": list("née".encode())}
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "née"}
    assert http.post("/detokenize", json={"tokens": [999999]}).status_code == 400
    of_chat = http.post("/tokenize", json={"messages": COUNT_MESSAGES}).json()
    assert of_chat["count"] > len(COUNT)


def test_metrics_add_up(http: httpx.Client) -> None:
    def counted() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, value in pairs}

    before = counted()
    usage = http.post("/v1/completions", json={"prompt": COUNT, "n": 3}).json()["usage"]
    after = counted()
    grown = {
        name: after[f"penstock:{name}"] - before[f"penstock:{name}"]
        for name in (
            "generation_tokens_total",
            "prompt_tokens_total",
            "e2e_request_latency_seconds_count",
        )
    }
    assert grown == {
        "generation_tokens_total": usage["completion_tokens"],
        "prompt_tokens_total": 3 * usage["prompt_tokens"],
        "e2e_request_latency_seconds_count": 3,
    }
