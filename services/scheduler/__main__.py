"""`python -P -m penstock.services.scheduler`."""

from penstock.services.scheduler.process import main

main()
