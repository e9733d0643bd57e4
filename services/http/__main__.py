"""`python -P -m penstock.services.http`: HTTP on uvloop."""

from penstock.services.http.process import main

if __name__ == "__main__":
    main()
