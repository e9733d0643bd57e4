"""Standard input of `launch ask`."""

import os
import select
import stat
import sys

from penstock.launch.pipeline.errors import LaunchError

MAX_BYTES = 1 << 26  # no context is as long
SILENCE = 2.0  # seconds without input after which the command reports that it waits
STDIN = 0


def read_input() -> str:
    """Return the text of the standard input, without line ends at its end.

    A terminal, or any device, has none. Raises LaunchError for bytes that are not text.
    """
    mode = os.fstat(STDIN).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISDIR(mode):
        return ""
    if not select.select([STDIN], [], [], SILENCE)[0]:
        text = "launch: reading the standard input to its end; `< /dev/null` gives none"
        print(text, file=sys.stderr, flush=True)
    with open(STDIN, "rb", closefd=False) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise LaunchError(f"standard input: got more than {MAX_BYTES >> 20} MiB, expected less")
    try:
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"standard input: got byte {error.object[error.start]:#04x} at {error.start}, "
            "expected text in UTF-8"
        ) from None
