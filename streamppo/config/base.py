"""The base of every table of the configuration, and its kinds of numbers."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every table of the file."""

    def contradictions(self) -> Iterator[str]:
        """A sentence for every rule between the fields that is broken."""
        return iter(())

    def __post_init__(self) -> None:
        """Raise `ValueError` with a line for every rule that is broken."""
        if broken := list(self.contradictions()):
            raise ValueError("\n".join(broken))


class Timed(Section, frozen=True):
    """Base of tables about calls of other people's code."""

    timeout_s: Seconds = 30.0
    """A call that takes longer fails its trajectory: of a scorer, or an environment's reset, step or close."""


class Kind(Section, frozen=True, tag_field="kind"):
    """Base of every table that is one choice of several; its tag is given by each subclass."""
