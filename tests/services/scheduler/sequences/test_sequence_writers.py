"""The docstring of `Sequence` names the writers of its fields, and no other code writes them."""

from pathlib import Path

from penstock.services.scheduler import sequence as sequence_module
from penstock.services.scheduler.sequence import Sequence
from tests.services.field_writers import found_writers, stated_writers

FOLDER = Path(str(sequence_module.__file__)).parent
OTHERS = "self|status|outbox|extras"
"""names of other objects, which have fields of the same names"""


def test_the_docstring_names_every_writer() -> None:
    assert found_writers(FOLDER, Sequence.__slots__, unnamed=OTHERS) == stated_writers(Sequence)
