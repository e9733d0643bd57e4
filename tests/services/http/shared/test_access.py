"""Access: keys, web pages of other origins; and paths that clients use."""

import hmac
from typing import Any

import httpx
import pytest

from penstock.protocol.messages.client import GenerateRequest
from tests.services.http.conftest import Serve

pytestmark = pytest.mark.slow

KEY = "schlüssel"
UTF8, LATIN1 = KEY.encode(), KEY.encode("latin-1")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Authorization", b"Bearer " + UTF8, 200),
        ("Authorization", b"bearer " + UTF8, 200),
        ("authorization", b"BEARER   " + LATIN1, 200),
        ("X-API-Key", UTF8, 200),
        ("x-api-key", LATIN1, 200),
        ("Authorization", b"Basic " + UTF8, 401),
        ("Authorization", UTF8, 401),
        ("Authorization", b"Bearer", 401),
        ("Authorization", b"Bearer " + UTF8 + b"x", 401),
        ("X-API-Key", b"schl\xff", 401),
        ("X-API-Key", b"", 401),
        ("Cookie", UTF8, 401),
    ],
)
def test_the_key(serve: Serve, name: str, value: bytes, status: int) -> None:
    with serve(api_key=KEY).client() as client:
        assert client.get("/v1/models", headers=[(name.encode(), value)]).status_code == status


def test_every_key_is_compared_in_the_same_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right, wrong and missing keys go through `hmac.compare_digest`, in both encodings."""
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def record(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return compare(given, expected)

    monkeypatch.setattr(hmac, "compare_digest", record)
    with serve(api_key=KEY).client() as client:
        for given in (UTF8, LATIN1, UTF8[:-1], b"x", b""):
            client.get("/v1/models", headers=[(b"X-API-Key", given)])
            assert compared == [UTF8, LATIN1]
            compared.clear()


def test_a_key_that_latin_1_does_not_have(serve: Serve) -> None:
    """Other encodings of the key's letters are not the key."""
    with serve(api_key="ключ").client() as client:
        for value, status in (("ключ".encode(), 200), (b"????", 401)):
            headers = [(b"Authorization", b"Bearer " + value)]
            assert client.get("/v1/models", headers=headers).status_code == status


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    return client.options("/v1/chat/completions", headers=headers)


def test_pages_of_allowed_origins(serve: Serve) -> None:
    allowed, other = "https://app.example", "https://other.example"
    with serve(api_key=KEY, allowed_origins=f'["{allowed}"]').client() as client:
        answer = preflight(client, allowed)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert preflight(client, other).status_code == 400
        for origin, shown in ((allowed, allowed), (other, None)):
            for path in ("/v1/models", "/health"):
                answer = client.get(path, headers={"Origin": origin})
                assert answer.headers.get("access-control-allow-origin") == shown


def test_pages_of_any_origin(serve: Serve) -> None:
    with serve(allowed_origins="*").client() as client:
        assert preflight(client, "https://a").headers["access-control-allow-origin"] == "*"
        answer = client.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": "null"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


EVIL = "http://evil.example"


def status(client: httpx.Client, **headers: str) -> int:
    """Asks as a page does that needs no permission: text/plain is sent without a preflight."""
    headers = {"Content-Type": "text/plain", **headers}
    answer = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    if answer.status_code == 403:
        assert answer.json()["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    return answer.status_code


def test_pages_need_a_permission_where_there_is_no_key(serve: Serve) -> None:
    served = serve()
    host, port = served.address
    with served.client() as client:
        assert preflight(client, EVIL).status_code == 403
        assert client.get("/version", headers={"Origin": EVIL}).status_code == 403
        for origin in (EVIL, "null", f"http://{host}:1", f"http://{host}", f"{EVIL}:{port}"):
            assert status(client, Origin=origin) == 403
        assert status(client) == 200
        assert status(client, Origin=served.url) == 200


def test_a_page_whose_name_points_here_is_refused(serve: Serve) -> None:
    """DNS rebinding: the page and this server have one origin."""
    served = serve(allowed_origins='["https://app.example"]')
    port = served.address[1]
    with served.client() as client:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::1"):
            for name in (host, f"{host}:{port}"):
                assert status(client, Host=name, Origin=f"http://{name}") == 403
                assert status(client, Host=name) == 403
        names = ("localhost", "LOCALHOST", "app.localhost", "127.0.0.1", "[::1]", "app.example")
        for host in names:
            assert status(client, Host=f"{host}:{port}", Origin=f"http://{host}:{port}") == 200
        assert status(client, Origin="https://app.example") == 200


@pytest.mark.parametrize(
    "options", [{"api_key": KEY}, {"allowed_origins": "*"}], ids=["key", "any origin"]
)
def test_pages_and_names_where_access_is_decided_otherwise(
    serve: Serve, options: dict[str, str]
) -> None:
    key = {"X-API-Key": KEY.encode()}
    with serve(**options).client(headers=key) as client:
        assert status(client, Host="evil.example", Origin=EVIL) == 200


def test_names_of_a_server_that_other_machines_reach(serve: Serve) -> None:
    """Their users chose --insecure; pages of other origins stay out."""
    with serve(http_host="0.0.0.0", insecure=True).client() as client:  # noqa: S104
        assert status(client, Host="gpu-box:8000") == 200
        assert status(client, Host="gpu-box:8000", Origin="http://gpu-box:8000") == 200
        assert status(client, Host="gpu-box:8000", Origin=EVIL) == 403


@pytest.mark.parametrize("value", ["née".encode(), "née".encode("latin-1"), b"a" * 128, b"id-1"])
def test_request_ids(serve: Serve, value: bytes) -> None:
    """The client's is in the header and the body of the response, also of an error."""
    text = {b"n\xe9e": "née"}.get(value) or value.decode()
    headers = [(b"X-Request-Id", value)]
    with serve().client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.json()["id"] == f"cmpl-{text}"
        assert dict(answer.headers.raw)[b"x-request-id"] == value
        for path in ("/none", "/v1/models", "/"):
            answer = client.get(path, headers=headers)
            assert dict(answer.headers.raw)[b"x-request-id"] == value


@pytest.mark.parametrize("headers", [[], [("X-Request-Id", "a" * 129)], [("X-Request-Id", "a\tb")]])
def test_a_request_without_a_valid_id_gets_one(serve: Serve, headers: Any) -> None:
    with serve().client() as client:
        fields = {"prompt": "a"}
        answer = client.post("/v1/completions", json=fields, headers=headers)
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
        assert len(answer.headers["x-request-id"]) == 32
        named = client.post("/v1/completions", json=fields | {"request_id": "mine"}).json()
        assert named["id"] == "cmpl-mine"
        with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as stream:
            assert stream.headers["x-request-id"] != answer.headers["x-request-id"]


def test_a_request_without_a_model_goes_to_the_first_one(serve: Serve) -> None:
    served = serve(served_model_name="org/name")
    with served.client() as client:
        for model in ({}, {"model": None}, {"model": ""}):
            answer = client.post("/v1/completions", json={"prompt": "one", **model})
            assert answer.json()["model"] == "org/name"
            (asked,) = (one for one in served.asked.heard if isinstance(one, GenerateRequest))
            assert asked.model == "org/name"
            served.asked.heard.clear()


def test_a_model_has_several_names(serve: Serve) -> None:
    """A reply has the first one, as in vLLM."""
    with serve(served_model_name=("org/name", "b")).client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["org/name", "b"]
        assert client.get("/v1/models/b").json() == listed[1]
        for name in ("org/name", "b", None):
            for stream in (False, True):
                body = {"prompt": "one", "model": name, "stream": stream}
                assert '"model":"org/name"' in client.post("/v1/completions", json=body).text
        refused = client.post("/v1/completions", json={"prompt": "one", "model": "c"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "model: got 'c', expected 'org/name' or 'b'" in refused.text


def test_paths_with_a_slash_at_their_end(serve: Serve) -> None:
    with serve(served_model_name="org/name").client() as client:
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        assert client.get("/v1/models/org/name").json()["id"] == "org/name"
        assert client.get("/v1/models/org/name/").json()["id"] == "org/name"
        assert client.get("/v1/models/none").status_code == 404
        body = {"prompt": "one"}
        assert client.post("/v1/completions/", json=body).json()["choices"][0]["text"] == "one"
        assert client.get("/").headers["content-type"].startswith("text/html")


def test_ping(serve: Serve) -> None:
    with serve(api_key=KEY).client() as client:
        for method in ("GET", "POST"):
            assert client.request(method, "/ping").status_code == client.get("/health").status_code
