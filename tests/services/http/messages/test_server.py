"""Messages over real connections."""

from pathlib import Path

import anthropic
import pytest

from tests.services.http.conftest import Serve, behave
from tests.services.http.test_apis import CHAT, answering


def test_messages_have_ids_of_their_own(serve: Serve) -> None:
    """Clients join messages by id; a retried request has the same X-Request-Id."""
    with serve(answering).client(headers={"X-Request-Id": "mine"}) as client:
        sent = [client.post("/v1/messages", json=CHAT | {"max_tokens": 9}) for _ in range(2)]
    assert [one.status_code for one in sent] == [200, 200], sent[0].text
    assert [one.headers["request-id"] for one in sent] == ["mine", "mine"]
    ids = [one.json()["id"] for one in sent]
    assert ids[0] != ids[1]
    assert all(name.startswith("msg_") and "mine" not in name for name in ids)


def test_models(serve: Serve) -> None:
    served = serve(behave)
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        (one,) = client.models.list()
        assert (one.id, one.type, one.display_name) == ("qwen3-demo", "model", "qwen3-demo")
        assert (one.lifecycle, one.max_input_tokens, one.max_tokens) == ("active", 4096, 4096)
        assert client.models.retrieve("qwen3-demo") == one
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("claude")
        assert caught.value.type == "not_found_error"
    with served.client() as other:
        (same,) = other.get("/v1/models").json()["data"]
        assert (same["object"], same["created"]) == ("model", int(one.created_at.timestamp()))
        assert (Path(same["root"]) / "tokenizer.json").is_file()  # for `vllm bench serve`
        assert other.get("/v1/models/claude").json()["error"]["code"] == "model_not_found"
