"""The docstring of `Request` names the writers of its fields, and no other code writes them."""

from pathlib import Path

from penstock.services.gateway import request as request_module
from penstock.services.gateway.request import Request
from tests.services.field_writers import found_writers, stated_writers
from tests.services.gateway.conftest import accepted

FOLDER = Path(str(request_module.__file__)).parent
NAMES = "request|work"  # of variables: other classes have fields of the same names


def test_the_docstring_names_every_writer() -> None:
    fields = {"totals", *vars(accepted())}
    assert found_writers(FOLDER, fields, named=NAMES) == stated_writers(Request)
