"""The docstring of `Entry` names the writers of its fields, and no other code writes them."""

from pathlib import Path

from penstock.protocol.messages.client import JSON, GenerateRequest
from penstock.services.gateway import entry as entry_module
from penstock.services.gateway.client import Client, Connection, Share
from penstock.services.gateway.entry import Entry
from tests.services.field_writers import found_writers, stated_writers

FOLDER = Path(str(entry_module.__file__)).parent
NAMES = "entry|work"
"""of variables that are entries: other classes have fields of the same names"""


def test_the_docstring_names_every_writer() -> None:
    client = Client((b"c",), JSON, Connection(), Share(""))
    fields = {"totals", *vars(Entry(GenerateRequest(), "", client))}
    assert found_writers(FOLDER, fields, named=NAMES) == stated_writers(Entry)
