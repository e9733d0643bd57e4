"""Models with recurrent state in a real pipeline: workers and scheduler are killed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.models.hybrid import save_hybrid
from tests.models.toy import site
from tests.models.toy.family import registered
from tests.models.toy.model import save_checkpoint
from tests.models.toy.test_state import plain
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture

pytestmark = pytest.mark.chaos
NUM_OUT = 100
SAMPLING = {"temperature": 0.0, "max_tokens": NUM_OUT, "ignore_eos": True}
OPTIONS = {
    "plain": ["--block-size", "16"],
    "spare": ["--block-size", "16", "--spare-workers", "1", "--speculative-method", "ngram"],
    "ranks": ["--block-size", "16", "--tp", "2"],
    "Qwen3.5": ["--block-size", "16", "--spare-workers", "1", "--speculative-method", "ngram"],
}


@pytest.fixture(scope="module", autouse=True)
def families() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module", params=OPTIONS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if name != "Qwen3.5":
        return save_checkpoint(folder)
    save_hybrid(folder, is_multimodal=True)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = Random(2)
    shared = [random.randrange(1, 264) for _ in range(150)]
    return [[*shared[: 50 * n], *(random.randrange(1, 264) for _ in range(9))] for n in range(4)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return plain(folder, prompts, NUM_OUT)


@pytest.fixture(scope="module")
def served(
    folder: Path,
    name: str,
    pipeline: Callable[..., Pipeline],  # noqa: F811
) -> Pipeline:
    """Start a pipeline whose processes know the toy family."""
    root = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*site.__path__, root]))
        return pipeline("--model", str(folder), "--max-deaths", "100", *OPTIONS[name])


@pytest.mark.parametrize("victim", ["worker.1", "scheduler.1", "both"])
def test_the_tokens_of_a_plain_loop(
    served: Pipeline, prompts: list[list[int]], expected: list[list[int]], victim: str
) -> None:
    with served.client() as client:
        for _ in range(2):
            streams = [client.stream(prompt, **SAMPLING) for prompt in prompts]
            for stream in map(iter, streams):
                next(stream)
            victims = ("worker.1", "scheduler.1") if victim == "both" else (victim,)
            for name in victims:
                served.kill(name)
            assert [stream.result().token_ids for stream in streams] == expected
