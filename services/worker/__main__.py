from penstock.services.worker.model_runner import load
from penstock.services.worker.process import main

main(load)
