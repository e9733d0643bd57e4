"""`python -P -m penstock.services.gateway`."""

from penstock.services.gateway.process import main

main()
