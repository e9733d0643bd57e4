"""Standard streams of the command line, and Ctrl-C before it runs."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launch.commands import cli
from penstock.launch.commands.cli import main


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in which `$LAUNCH` is `launch`."""
    own = {"LAUNCH": f"{sys.executable} -P -m penstock.launch"}
    command = ["bash", "-c", line]
    return subprocess.run(command, env=os.environ | own | environment, capture_output=True)


def test_closed_streams_are_no_sockets() -> None:
    """The numbers 0 to 2 belong to /dev/null: a log line in a socket would be a bad message."""
    code = (
        "import os; from penstock.launch.commands.cli import _prepare_streams as prepare\n"
        "prepare(); os.write(7, b' '.join(os.readlink(f'/proc/self/fd/{n}').encode() for n in "
        "range(3)))\n"
        "import subprocess; subprocess.run(['true'], check=True)"
    )
    done = shell(f'{sys.executable} -P -c "{code}" 7>&1 <&- >&- 2>&-')
    assert (done.returncode, done.stdout) == (0, b"/dev/null /dev/null /dev/null")


def test_bytes_that_are_not_text_are_replaced_in_the_input() -> None:
    code = "from penstock.launch.commands.cli import _prepare_streams as prepare; prepare()"
    done = shell(rf"printf 'a\377\n' | {sys.executable} -P -c '{code}; print(input())'")
    assert done.stdout.decode() == "a\ufffd\n"


def test_an_encoding_without_a_character_is_no_error() -> None:
    done = shell("$LAUNCH all --model /ä", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(rb"launch: --model: got '/\xe4', expected an existing folder")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("$LAUNCH > /dev/full", b"launch: No space left on device\n"),
        ("$LAUNCH --version > /dev/full", b"launch: No space left on device\n"),
        ("$LAUNCH models > /dev/full", b"launch: No space left on device\n"),
        ("ulimit -f 0; $LAUNCH --version > out", b"launch: File too large\n"),
        ("$LAUNCH --version | true; exit ${PIPESTATUS[0]}", b""),
    ],
)
def test_output_that_can_not_be_written_is_one_sentence_at_most(
    tmp_path: Path, line: str, said: bytes, unbuffered: str
) -> None:
    """Whatever prints the words, with a buffer and without."""
    done = shell(f"cd {tmp_path}; {line}", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, said)


def test_an_error_of_another_file_is_none_of_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/x")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(OSError, match="/x"):
        main()


def test_ctrl_c_during_the_imports() -> None:
    program = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "penstock.launch.commands.cli":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["launch", "--nonsense"]
from penstock.launch.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
