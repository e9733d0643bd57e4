"""`python -P -m penstock.services.detokenizer`."""

from penstock.services.detokenizer.process import main

if __name__ == "__main__":
    main()
