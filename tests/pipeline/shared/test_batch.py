"""`launch batch`, with a real pipeline and its HTTP process."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.config import Config
from tests.pipeline.conftest import LAUNCH, START_TIMEOUT, Pipeline

pytestmark = pytest.mark.pipeline
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number}+1="}]
    body = {"messages": messages, **body}
    return {"custom_id": f"chat-{number}", "method": "POST", "url": CHAT, "body": body}


def text(number: int, prompt: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3000, **body}
    return {"custom_id": f"text-{number}", "method": "POST", "url": TEXT, "body": body}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    )
    return path


def batch(shared: Pipeline, source: Path, target: Path, *flags: str) -> tuple[int, str]:
    """Its exit code and what it says last."""
    ended = shared.run("batch", str(source), str(target), *flags)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stderr.splitlines()[-1]


def results(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {one["custom_id"] or one["id"]: one for one in found}
    assert len(by_name) == len(found)
    return by_name


def test_every_line_has_its_result(shared: Pipeline, tmp_path: Path) -> None:
    lines = [
        *(chat(number) for number in range(20)),
        text(1, "count from 3 to 9"),
        chat(98, temperature=9),
        "",
        "no JSON",
        {"custom_id": "elsewhere", "method": "POST", "url": "/v1/images", "body": {}},
        text(2, "x", stream=True),
    ]
    source, target = write(tmp_path / "in", *lines), tmp_path / "out"
    code, said = batch(shared, source, target, "--concurrency", "4")
    assert (code, said) == (1, f"{target}: 3 bad, 21 done, 1 refused")
    found = results(target)
    for number in range(20):
        response = found[f"chat-{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == str(number + 1)
    assert found["text-1"]["response"]["body"]["choices"][0]["text"] == "3 4 5 6 7 8 9"
    refused = found["chat-98"]
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert "temperature" in refused["response"]["body"]["error"]["message"]
    for name, reason in (
        ("batch_req_24", "malformed"),
        ("elsewhere", "Invalid enum value '/v1/images'"),
        ("text-2", "no streams"),
    ):
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == "invalid_line"
        assert reason in found[name]["error"]["message"]
    before = target.read_text()
    code, said = batch(shared, source, target)
    errors = "3 bad in an earlier run, 1 refused in an earlier run"
    assert (code, said) == (1, f"{target}: {errors}, 21 skipped")
    assert target.read_text() == before


def test_bytes_that_are_no_text(shared: Pipeline, tmp_path: Path) -> None:
    """A byte order mark is ignored; lines that can't be decoded are results, others are done."""
    source, target = tmp_path / "in", tmp_path / "out"
    good = [json.dumps(chat(number)).encode() for number in range(2)]
    deep = b'{"custom_id": "deep", "url": "%b", "body": {"prompt": ' % TEXT.encode()
    bad = (b'{"custom_id": "\xff"}', deep + b"[" * 100_000)
    source.write_bytes(b"\n".join([b"\xef\xbb\xbf" + good[0], *bad, good[1]]))
    assert batch(shared, source, target) == (1, f"{target}: 2 bad, 2 done")
    found = results(target)
    assert "can't decode byte 0xff" in found["batch_req_2"]["error"]["message"]
    assert "recursion" in found["batch_req_3"]["error"]["message"]
    target.write_bytes(b"\xff\n")
    code, said = batch(shared, source, target)
    assert (code, f"{target}:1 is not a result of a batch" in said) == (2, True)


def test_it_goes_on_where_it_was_stopped(shared: Pipeline, tmp_path: Path) -> None:
    lines = [text(1, "count from 1 to 200"), *(chat(number) for number in range(2))]
    source, target = write(tmp_path / "in", *lines), tmp_path / "out"
    with subprocess.Popen(
        [*LAUNCH, "batch", "--name", shared.name, str(source), str(target), "--concurrency", "2"],
        stderr=subprocess.DEVNULL,
    ) as process:
        with shared.client() as client:
            while not (target.exists() and target.read_text().count("\n") >= 2):
                assert process.poll() is None
                client.status()  # a turn of the gateway's loop
        with shared.suspended("worker.1"):
            process.send_signal(signal.SIGINT)
            assert process.wait(START_TIMEOUT) == 130
    whole = target.read_text()
    assert whole.count("\n") == 2
    assert "text-1" not in whole
    with target.open("a") as half:
        half.write('{"id":"batch_req_1","custom_id":"text-1","resp')
    code, said = batch(shared, source, target)
    assert (code, said) == (0, f"{target}: 1 done, 2 skipped")
    assert target.read_text().startswith(whole)
    content = results(target)["text-1"]["response"]["body"]["choices"][0]["text"]
    assert content == " ".join(map(str, range(1, 201)))


def test_another_file_is_left_alone(shared: Pipeline, tmp_path: Path) -> None:
    source = write(tmp_path / "in", chat(1))
    code, said = batch(shared, source, source)
    assert code == 2
    assert f"{source}:1 is not a result of a batch" in said
    assert source.read_text() == json.dumps(chat(1)) + "\n"
    code, said = batch(shared, tmp_path / "none", tmp_path / "out")
    assert (code, said) == (2, f"launch: {tmp_path}/none: No such file or directory")


def test_a_pipeline_of_its_own(shared: Pipeline, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", chat(1)), tmp_path / "out"
    model = Config().model_folder
    flags = ("--model", str(model), "--device", "cpu", "--num-threads", "1")
    flags += ("--kv-cache-gib", "0.1")
    code, said = batch(shared, source, target, *flags)
    assert (code, said) == (0, f"{target}: 1 done")
    code, said = batch(shared, source, target, "--tp", "2")
    assert (code, said) == (2, "launch: --tp is for a pipeline that is yet to start")
