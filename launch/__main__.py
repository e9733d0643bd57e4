"""The entry point: `launch`, or `python -P -m penstock.launch` where that is not on the PATH.

Ctrl-C during the imports waits until `main` handles it, by its exit codes.
"""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

from penstock.launch.commands.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
