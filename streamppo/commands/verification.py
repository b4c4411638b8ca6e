"""The result of `streamppo verify`. This module imports neither Ray nor torch."""

from collections.abc import Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """A difference between the run and its records, in the file or folder `place`."""

    place: str
    what: str


class Verification(NamedTuple):
    """Counts of the compared versions, batches and checkpoints, and the `faults` in them.

    `digest` is the run's digest, `link` the digest of its newest version; both are "" if the journal cannot be read.
    `remade` are the replayed versions. `notes` name parts that were not compared.
    """

    digest: str
    link: str
    versions: int
    batches: int
    checkpoints: int
    remade: Sequence[int]
    faults: Sequence[Fault]
    notes: Sequence[str]
