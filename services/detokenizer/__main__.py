"""`python -P -m penstock.services.detokenizer`."""

from penstock.services.detokenizer.process import main

main()
