"""`python -P -m penstock.services.worker`."""

from typing import NoReturn

import torch

from penstock.services.worker import start
from penstock.services.worker.loading import load

if torch.version.cuda:  # the steps need it; forked processes share it
    import triton  # noqa: F401


def main() -> NoReturn:
    """Run until SIGTERM."""
    start.main(load)


if __name__ == "__main__":
    main()
