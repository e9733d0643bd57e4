"""The tiers of the KV cache: what is evicted comes back, whatever dies, and texts stay the same."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_letters
from typing import NamedTuple

import pytest
import xxhash

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.status import SchedulerStatus
from penstock.services.worker.memory.kv_folder import HEADER_BYTES
from tests.pipeline.conftest import LAUNCH, Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
]
SMALL = ("--num-blocks", "48", "--max-deaths", "1000", "--kv-offload-gib", "0.05")
"""KV blocks for two of the prompts, host slots for all"""
PROMPTS = [f"{number} " + f"reverse: {'penstock' * 3} " * 12 for number in range(8)]


class Answers(NamedTuple):
    """Texts of all prompts, and the tokens of these that were found in a cache."""

    texts: list[str]
    num_cached: list[int]


def ask(served: Pipeline, prompts: Sequence[str] = PROMPTS) -> Answers:
    with served.client() as client:
        results = [client.generate(prompt, max_tokens=16) for prompt in prompts]
    return Answers([one.text for one in results], [one.usage.cached_tokens for one in results])


def scheduler(served: Pipeline) -> SchedulerStatus:
    with served.client() as client:
        status = client.status(fresh=True).scheduler
    assert status
    return status


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline(*SMALL)


@pytest.fixture(scope="module")
def first(served: Pipeline) -> Answers:
    """Return answers whose KV was computed."""
    answers = ask(served)
    assert max(answers.num_cached) == 0
    return answers


def test_evicted_blocks_come_back(served: Pipeline, first: Answers) -> None:
    before = scheduler(served).num_offload_hits
    again = ask(served)
    assert again.texts == first.texts
    assert min(again.num_cached) > 250
    num_hits = scheduler(served).num_offload_hits - before
    assert num_hits > 6 * 250


def test_a_salt_that_spells_a_block_spoils_nothing(served: Pipeline, first: Answers) -> None:
    """The KV of a prompt's second block must not be that of another client's first block."""
    with served.client() as client:
        ids = [client.tokenize(letter).token_ids[0] for letter in "repeat: " + ascii_letters]
        client.generate(ids[16:], max_tokens=1, cache_salt=pack(ids[:16]).decode())
        right = client.generate(ids, max_tokens=60, cache_salt="a salt of its own")
        for _ in range(2):
            assert ask(served).texts == first.texts
            again = client.generate(ids, max_tokens=60)
            assert again.token_ids == right.token_ids
    assert again.usage.cached_tokens > 16


@pytest.mark.parametrize("name", ["worker.1", "scheduler.1"])
def test_the_host_tier_outlives_a_process(served: Pipeline, first: Answers, name: str) -> None:
    start = len(served.output)
    served.kill(name)
    served.wait_for(r"scheduler\.1 +\| .* I workers ready", start)
    again = ask(served)
    assert again.texts == first.texts
    assert min(again.num_cached) > 250


def test_preempted_sequences_get_their_blocks_back(served: Pipeline) -> None:
    before = scheduler(served)
    prompts = [count_prompt(number, 100) for number in range(4)]
    with served.client() as client:
        streams = [client.stream(prompt) for prompt in prompts]
        texts = ["".join(delta.text for delta in stream) for stream in streams]
    after = scheduler(served)
    assert texts == [answer_to(prompt) for prompt in prompts]
    num_preempted = after.num_preemptions - before.num_preemptions
    num_recomputed = after.num_recomputed_tokens - before.num_recomputed_tokens
    assert num_preempted > 0
    assert after.num_offload_hits > before.num_offload_hits
    assert num_recomputed < 2 * after.block_size * num_preempted


def test_a_crash_loses_the_host_tier(served: Pipeline, first: Answers) -> None:
    start = len(served.output)
    served.kill("worker.1", signal.SIGSEGV)
    served.wait_for(
        r"scheduler\.1 +\| .* W host tier: its \d+ blocks ended with the workers", start
    )
    again = ask(served)
    assert again.texts == first.texts
    assert max(again.num_cached) == 0


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/??/*") if len(path.name) == 64]


@pytest.fixture(scope="module")
def folder(
    first: Answers, tmp_path_factory: pytest.TempPathFactory, pipeline: Callable[..., Pipeline]
) -> Path:
    """Return a folder with the files of a pipeline that has ended."""
    path = tmp_path_factory.mktemp("tier")
    served = pipeline(*SMALL, "--kv-offload-folder", str(path))
    while len(files(path)) < 100:
        assert ask(served).texts == first.texts
    served.process.terminate()
    assert served.wait() == 0
    return path


LISTED = r"worker\.1 +\| .* I KV blocks in .*: [1-9]"


def damage(path: Path) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(50_000)
        byte = file.read(1)[0]
        file.seek(50_000)
        file.write(bytes([byte ^ 1]))


def test_files_outlive_the_pipeline_and_damaged_ones_are_computed_again(
    first: Answers, folder: Path, pipeline: Callable[..., Pipeline]
) -> None:
    served = pipeline(*SMALL, "--kv-offload-folder", str(folder))
    served.wait_for(LISTED)
    some, others = PROMPTS[:4], PROMPTS[4:]
    again = ask(served, some)
    assert again.texts == first.texts[:4]
    assert sum(again.num_cached) > 200
    for path in files(folder):
        damage(path)
    assert ask(served, others).texts == first.texts[4:]
    served.wait_for(r"worker\.1 +\| .* W KV blocks in .* is damaged; its block is computed again")


def replace_content(path: Path) -> None:
    """Write another file's KV, as whoever may write to a file of mode 0602 can do."""
    header, content = path.read_bytes()[:HEADER_BYTES], path.read_bytes()[HEADER_BYTES:]
    start, content = header[: HEADER_BYTES - 16], content[::-1]
    path.write_bytes(start + xxhash.xxh3_128_digest(start + content) + content)
    path.chmod(0o602)


def test_files_and_folders_that_others_may_change_are_not_used(
    first: Answers, folder: Path, pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    copy = tmp_path / "tier"
    shutil.copytree(folder, copy)
    for path in files(copy):
        replace_content(path)
    served = pipeline(*SMALL, "--kv-offload-folder", str(copy))
    served.wait_for(LISTED)
    assert ask(served).texts == first.texts
    served.wait_for(r"worker\.1 +\| .* W KV blocks in .* has mode 602, so that others may write;")
    copy.chmod(0o770)
    refused = subprocess.run(
        [*LAUNCH, "all", *SMALL, "--kv-offload-folder", str(copy), "--name", "refused"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "tier has mode 770, so that others may write, expected a folder of u" in refused.stderr


@pytest.mark.long
def test_other_layouts_change_nothing(
    first: Answers, folder: Path, pipeline: Callable[..., Pipeline]
) -> None:
    """Blocks of another size have a folder of their own."""
    (used,) = folder.iterdir()
    served = pipeline(
        *SMALL[2:], *("--block-size", "8", "--num-blocks", "96"), "--kv-offload-folder", str(folder)
    )
    assert ask(served).texts == first.texts
    assert {used} < set(folder.iterdir())


@pytest.mark.long
def test_tiers_end_with_their_processes_where_no_memory_can_be_kept(
    first: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = ("prlimit", "--fsize=16384", *LAUNCH)
    monkeypatch.setattr("tests.pipeline.conftest.LAUNCH", limited)
    with Pipeline(*SMALL, "--kv-offload-folder", str(tmp_path)) as served:
        for reason in (
            r"worker\.1 +\| .* W memory ends with the worker: .*File too large",
            r"scheduler\.1 +\| .* W slots\.0: records end with the scheduler: .*File too large",
        ):
            served.wait_for(reason)
        for _ in range(2):
            assert ask(served).texts == first.texts
        assert scheduler(served).num_offload_hits > 0
        served.kill("scheduler.1")
        assert ask(served).texts == first.texts
