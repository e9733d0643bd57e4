"""Models with recurrent state in a real pipeline: workers and scheduler are killed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from penstock.launch.pipeline.control_client import list_processes
from tests.models.hybrid import add_mtp, save_hybrid
from tests.models.toy import site
from tests.models.toy.family import registered
from tests.models.toy.model import save_checkpoint
from tests.models.toy.test_state import plain
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture

pytestmark = pytest.mark.chaos
NUM_OUT = 100
SAMPLING = {"temperature": 0.0, "max_tokens": NUM_OUT, "ignore_eos": True}
FOLDER = "a folder of its own"
SCARCE = ["--block-size", "16", "--num-blocks", "48", "--max-num-seqs", "3"]
"""blocks for the sequences that run, and for no others"""
OPTIONS = {
    "plain": ["--block-size", "16"],
    "spare": ["--block-size", "16", "--spare-workers", "1", "--speculative-method", "ngram"],
    "ranks": ["--block-size", "16", "--tp", "2"],
    "Qwen3.5": ["--block-size", "16", "--spare-workers", "1", "--speculative-method", "ngram"],
    "tiers": [*SCARCE, "--kv-offload-gib", "0.05", "--kv-offload-folder", FOLDER],
    "Qwen3.5 with tiers": [
        *(*SCARCE, "--kv-offload-gib", "0.2", "--kv-offload-folder", FOLDER),
        *("--spare-workers", "1", "--speculative-method", "ngram"),
    ],
    "MTP": ["--block-size", "16", "--spare-workers", "1", "--speculative-method", "mtp"],
    "MTP ranks": ["--block-size", "16", "--tp", "2", "--speculative-method", "mtp"],
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
    if "Qwen3.5" in name:
        save_hybrid(folder, is_multimodal=True)
    elif name.startswith("MTP"):
        add_mtp(folder, save_hybrid(folder), predicts=True)
    else:
        save_checkpoint(folder)
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
    tmp_path_factory: pytest.TempPathFactory,
) -> Pipeline:
    """Start a pipeline whose processes know the toy family."""
    root, tier = str(Path(__file__).parents[2]), str(tmp_path_factory.mktemp("tier"))
    options = [tier if option == FOLDER else option for option in OPTIONS[name]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*site.__path__, root]))
        return pipeline("--model", str(folder), "--max-deaths", "100", *options)


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


def test_checkpoints_outlive_all_deaths_in_the_tiers(
    served: Pipeline, name: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A prompt that other requests have evicted is found up to its checkpoint."""
    if "tiers" not in name:
        pytest.skip("needs tiers")
    random = Random(6)
    with served.client() as client:
        for prompt in prompts:
            client.generate(prompt, max_tokens=1)
        for kind in ("worker", "scheduler"):
            for _ in range(8):  # evict
                client.generate([random.randrange(1, 264) for _ in range(150)], max_tokens=2)
            scheduler = client.status().scheduler
            assert scheduler
            victim = scheduler.workers[0] if kind == "worker" else "scheduler.1"
            start = len(served.output)
            served.kill(victim)
            served.wait_for(r"scheduler\.1 +\| .* I workers ready", start)
            results = [client.generate(prompt, **SAMPLING) for prompt in prompts]
            assert [result.token_ids for result in results] == expected
            cached = [result.usage.cached_tokens for result in results]
            assert cached == [(len(prompt) - 1) // 64 * 64 for prompt in prompts]


def test_drafts_are_accepted(served: Pipeline, name: str) -> None:
    if not name.startswith("MTP"):
        pytest.skip("random weights guess nothing")
    with served.client() as client:
        client.stream([1, 2, 3], **SAMPLING).result()
    counters: dict[str, float] = {}
    while not counters.get("accepted_tokens_total"):  # of the next heartbeat
        processes = list_processes(served.name)
        counters = next(one.counters for one in processes if one.name == "scheduler.1")
    assert counters["accepted_tokens_total"] < counters["draft_tokens_total"]
