"""Several models of one gateway: two that generate text, and an embedding model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock import RequestError
from tests.models.checkpoints import save_embedding_model
from tests.pipeline.conftest import PATIENT, Pipeline
from tests.pipeline.load import Load
from tests.pipeline.ports import free_port

pytestmark = [pytest.mark.pipeline, pytest.mark.timeout(300)]
NAMES = ["one", "uno", "org/two", "embedder"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an embedding model of few positions."""
    folder = tmp_path_factory.mktemp("models") / "embedder"
    folder.mkdir()
    save_embedding_model(folder, max_position_embeddings=600)
    return folder


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(folder: Path, port: int) -> Iterator[Pipeline]:
    one = ("--model", "", "--served-model-name", "one", "uno", "--max-model-len", "1024")
    two = ("--model", "", "--served-model-name", "org/two", "--tp", "2")
    http = ("--model", str(folder), "--http", "1", "--http-port", str(port))
    with Pipeline(*PATIENT, "--max-deaths", "1000", *one, *two, *http) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def client(running: Pipeline, port: int) -> openai.OpenAI:
    assert running.process.poll() is None
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)


def test_each_has_processes_of_its_own(running: Pipeline) -> None:
    assert [*running.processes()] == [
        *("gateway.1", "one/tokenizer.1", "two/tokenizer.1", "embedder/tokenizer.1"),
        *("one/scheduler.1", "two/scheduler.1", "embedder/scheduler.1"),
        *("one/worker.1", "two/worker.1", "two/worker.2", "embedder/worker.1"),
        *("one/detokenizer.1", "two/detokenizer.1", "embedder/detokenizer.1", "http.1"),
    ]
    text = running.run("status").stdout
    assert "one: ready\n" in text
    assert "org/two: ready\n" in text
    assert "embedder: ready\n" in text


def test_the_name_chooses(client: openai.OpenAI) -> None:
    listed = {one.id: one.max_model_len for one in client.models.list()}  # type: ignore[attr-defined]
    assert [*listed] == NAMES
    assert listed == {"one": 1024, "uno": 1024, "org/two": 4096, "embedder": 600}
    assert client.models.retrieve("org/two").id == "org/two"
    for name, first in (("one", "one"), ("uno", "one"), ("org/two", "org/two")):
        reply = client.completions.create(model=name, prompt="17+25=", temperature=0)
        assert (reply.model, reply.choices[0].text) == (first, "42")
    vectors = client.embeddings.create(model="embedder", input=["a", "b"]).data
    assert len(vectors) == 2
    with pytest.raises(openai.NotFoundError, match="expected 'one' or 'uno' or 'org/two' or "):
        client.completions.create(model="three", prompt="17+25=")
    with pytest.raises(openai.BadRequestError, match="expected an embedding model"):
        client.embeddings.create(model="one", input="a")
    with pytest.raises(openai.BadRequestError, match="send inputs to /v1/embeddings"):
        client.completions.create(model="embedder", prompt="17+25=")


def test_every_route_reaches_the_named_model(client: openai.OpenAI) -> None:
    """An embedding model refuses all that generates text."""
    chat = {"messages": [{"role": "user", "content": "17+25="}], "max_tokens": 8}
    bodies: dict[str, dict[str, object]] = {
        "/chat/completions": chat,
        "/messages": chat,
        "/completions": {"prompt": "17+25=", "n": 2},
        "/responses": {"input": "17+25="},
    }
    for path, body in bodies.items():
        for is_stream in (False, True):
            sent = {"model": "embedder", "stream": is_stream, **body}
            with pytest.raises(openai.BadRequestError, match="send inputs to /v1/embeddings"):
                client.post(path, body=sent, cast_to=str)


def test_the_name_chooses_over_zeromq(running: Pipeline) -> None:
    """The first model is the default."""
    with running.client() as client:
        assert client.generate("17+25=").text == "42"
        assert client.generate("17+25=", model="org/two").text == "42"
        assert client.generate("17+25=", model="uno").text == "42"
        assert client.tokenize("17+25=").max_model_len == 1024
        assert client.tokenize("17+25=", model="org/two").max_model_len == 4096
        assert len(client.embed("a", model="embedder")) > 1
        with pytest.raises(
            RequestError, match="model: got 'two', expected 'one', 'uno', 'org/two', "
        ):
            client.generate("17+25=", model="two")


def test_a_command_names_a_model(running: Pipeline) -> None:
    where = ("--endpoint", running.endpoint)
    assert running.run("ask", "17+25=", "--model", "org/two", *where).stdout == "42\n"
    refused = running.run("ask", "17+25=", "--model", "embedder", *where).stderr
    assert "got an embedding model, which generates no text" in refused


def test_metrics_have_the_name(running: Pipeline, port: int) -> None:
    assert running.process.poll() is None
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    for name in ("one", "org/two", "embedder"):
        assert f'penstock:ready{{model_name="{name}"}} 1.0' in text
        assert f'penstock:num_requests_running{{model_name="{name}",replica="0"}}' in text


@contextlib.contextmanager
def streams_of_both(pipeline: Pipeline) -> Iterator[None]:
    """Have streams of two models run, which must all be complete."""
    loads = [Load(pipeline.endpoint, 3, name) for name in ("one", "org/two")]
    with loads[0], loads[1]:
        yield
        with pipeline.client() as client:
            client.status(wait=True)
    assert all(load.num_answers for load in loads)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("one/worker.1", marks=pytest.mark.long),
        *("two/worker.2", "two/scheduler.1", "one/tokenizer.1", "one/detokenizer.1"),
    ],
)
def test_a_death_is_of_one_model(running: Pipeline, victim: str) -> None:
    """Only processes of its model are restarted, and only its requests are submitted again."""
    start, before = len(running.output), running.processes()
    with streams_of_both(running):
        running.kill(victim)
    own = victim.partition("/")[0]
    changed = {name for name, pid in running.processes().items() if before[name] != pid}
    assert victim in changed
    assert {name.partition("/")[0] for name in changed} == {own}
    others = ({"one", "two"} - {own}).pop()
    log = "".join(running.output[start:])
    assert f"that {others}/scheduler.1 may lack" not in log
    assert f"that {own}/scheduler.1 may lack" in log or "scheduler" not in victim


def test_a_gateway_that_dies_has_the_requests_of_all(running: Pipeline) -> None:
    with running.client() as client:
        embedding = client.embed("a", model="embedder")
        with streams_of_both(running):
            running.kill("gateway.1")
            assert client.embed("a", model="embedder") == embedding


def test_health_names_the_model_that_does_not_serve(running: Pipeline, port: int) -> None:
    """The others continue to serve."""
    with running.client() as client:
        with running.suspended("two/scheduler.1"):
            while all(one.ready for one in client.status().models):
                assert client.generate("17+25=").text == "42"
            reply = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=60)
            assert client.generate("17+25=").text == "42"
            assert client.status().ready is False
        assert reply.status_code == 503
        assert reply.json()["error"]["message"].startswith("org/two: the scheduler is silent")
        client.status(wait=True)
        assert client.generate("17+25=", model="org/two").text == "42"


def test_processes_of_one_model_are_scaled_and_restarted(running: Pipeline) -> None:
    refused = running.run("scale", "tokenizer", "2")
    assert "expected one of gateway, one/tokenizer, two/tokenizer" in refused.stderr
    assert running.run("scale", "two/tokenizer", "2").stdout == "two/tokenizer: 2\n"
    assert "two/tokenizer.2" in running.processes()
    assert running.run("scale", "two/tokenizer", "1").stdout == "two/tokenizer: 1\n"
    before = running.processes()
    restarted = running.run("restart", "two/worker.1").stdout
    assert restarted == "two/worker.1, two/worker.2: back\n"
    restarted = running.run("restart", "embedder").stdout.splitlines()
    assert len(restarted) == 4
    changed = {name for name, pid in running.processes().items() if before[name] != pid}
    assert changed == {"two/worker.1", "two/worker.2"} | {
        f"embedder/{kind}.1" for kind in ("tokenizer", "scheduler", "worker", "detokenizer")
    }
