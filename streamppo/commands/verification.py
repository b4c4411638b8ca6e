"""What `streamppo verify` answers. Needs neither Ray nor torch."""

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """What differs, in the file or folder `place` of the run."""

    place: str
    what: str


class Verification(NamedTuple):
    """What was compared, and the `faults`; none if all is as it was recorded.

    `digest` is that of the run, `link` that of its newest version: empty if the journal cannot be read. `remade` are
    the versions that were replayed. `notes` say what was not compared.
    """

    digest: str
    link: str
    versions: int
    batches: int
    checkpoints: int
    remade: Sequence[int]
    faults: Sequence[Fault]
    notes: Sequence[str]
