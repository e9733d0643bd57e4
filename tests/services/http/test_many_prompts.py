"""A body with more prompts than one request may have."""

from collections.abc import Callable

import pytest

from tests.services.http.conftest import NUM_AT_START, Served


@pytest.mark.parametrize("echo", [False, True])
def test_too_many_prompts_are_refused_before_anything_is_asked(
    serve: Callable[..., Served], echo: bool
) -> None:
    served = serve()
    prompts = [[1]] * 5000
    with served.client() as client:
        answer = client.post(
            "/v1/completions", json={"prompt": prompts, "echo": echo, "truncate_prompt_tokens": 1}
        )
    assert answer.status_code == 400
    assert "got 5000 answers to 5000 prompts" in answer.text
    assert len(served.asked.heard) == NUM_AT_START
