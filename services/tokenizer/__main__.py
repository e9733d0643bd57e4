"""`python -P -m penstock.services.tokenizer`."""

from penstock.services.tokenizer.process import main

main()
