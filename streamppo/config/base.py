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
    """A call that takes longer fails its trajectory: of a scorer, teacher, or an environment's reset, step or close."""


class Calls(Timed, frozen=True):
    """Base of tables about calls of a scorer or a server: bounds and retries."""

    concurrency: Positive = 256
    """Calls in flight in one rollout actor."""
    attempts: Positive = 3
    """Tries of a call whose error says that it is retryable."""
    backoff_s: Seconds = 0.5
    """Wait before the second try; it doubles with every further one, and varies by half."""
    calls_per_s: NonNegative = 0.0
    """Bound on the calls that one rollout actor begins; 0 is none."""
    breaker_failures: Positive = 16
    """After so many retryable failures without a success, calls wait while one at a time tries again."""
    breaker_s: Seconds = 5.0
    """Seconds between two of these single tries."""


class Kind(Section, frozen=True, tag_field="kind"):
    """Base of every table that is one choice of several; its tag is given by each subclass."""


def address_fault(url: str) -> Iterator[str]:
    """A sentence if `url` does not say how a server is reached."""
    if not url.startswith(("http://", "https://")):
        yield f"url ({url!r}) must begin with http:// or https://"


class Machine(Section, frozen=True):
    """Hardware of one rank or one rollout actor."""

    gpus: NonNegative = 0
    """GPUs; less than 1 where rank and actor share one."""
