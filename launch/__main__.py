"""The entry point: `launch`, or `python -P -m penstock.launch` if that is not on the PATH."""

import signal
import sys

try:
    from penstock.launch.commands.cli import main
except KeyboardInterrupt:  # during the imports, before `main` handles it
    sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    main()
