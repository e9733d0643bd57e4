"""Entry point of a worker process, and of the process from which workers are forked."""

from penstock.protocol.transport.forks import serve_forks
from penstock.services.worker.device import import_triton
from penstock.services.worker.loading import load
from penstock.services.worker.start import main

serve_forks(import_triton)
main(load)
