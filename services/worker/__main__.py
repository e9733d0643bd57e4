"""Entry point of a worker process."""

from penstock.services.worker.loading import load
from penstock.services.worker.start import main

main(load)
