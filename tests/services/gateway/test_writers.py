"""The docstring of `Request` names the writers of its fields, and no other code writes them."""

from pathlib import Path

from penstock.protocol.messages.client import JSON, GenerateRequest
from penstock.services.gateway import request as request_module
from penstock.services.gateway.request import Client, Connection, Request, Share
from tests.services.field_writers import found_writers, stated_writers

FOLDER = Path(str(request_module.__file__)).parent
NAMES = "request|work"
"""of variables that are requests: other classes have fields of the same names"""


def test_the_docstring_names_every_writer() -> None:
    client = Client((b"c",), JSON, Connection(), Share(""))
    fields = {"totals", *vars(Request(GenerateRequest(), "", client))}
    assert found_writers(FOLDER, fields, named=NAMES) == stated_writers(Request)
