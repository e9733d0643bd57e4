"""`python -P -m penstock.services.tokenizer`."""

from penstock.services.tokenizer.process import main

if __name__ == "__main__":
    main()
