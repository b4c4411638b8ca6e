"""The result of `streamppo verify`. Needs neither Ray nor torch."""

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """A difference in the file or folder `place` of the run."""

    place: str
    what: str


class Verification(NamedTuple):
    """The counts of compared records, and the `faults`; empty if all is as recorded.

    `digest` is that of the run, `link` that of its newest version: empty if the journal cannot be read. `remade` are
    the versions that were replayed. `notes` name the parts that were not compared.
    """

    digest: str
    link: str
    versions: int
    batches: int
    checkpoints: int
    remade: Sequence[int]
    faults: Sequence[Fault]
    notes: Sequence[str]
