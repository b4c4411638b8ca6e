"""Base classes of the configuration's tables, and its number types."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
MOST_PROCESSES = 65_536
"""Maximum number of actors, ranks or shards: a run makes a list of all of them at its start."""
Processes: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_PROCESSES)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of every table of the configuration."""

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence for every broken rule between the fields."""
        return iter(())

    def __post_init__(self) -> None:
        if broken := list(self.contradictions()):
            raise ValueError("\n".join(broken))


class Timed(Section, frozen=True):
    """Base of tables about calls of user code."""

    timeout_s: Seconds = 30.0
    """Time limit of a call; a longer call fails its trajectory."""


class Calls(Timed, frozen=True):
    """Base of tables about calls of a scorer or a server: bounds and retries."""

    concurrency: Positive = 256
    """Calls in flight in one rollout actor."""
    attempts: Positive = 3
    """Maximum tries of a call, if its errors are retryable."""
    backoff_s: Seconds = 0.5
    """Wait before the second try, doubled before each further try."""
    calls_per_s: NonNegative = 0.0
    """Maximum calls of one rollout actor per second; 0 is no limit."""
    breaker_failures: Positive = 16
    """After this many consecutive retryable failures, one call at a time is made until one succeeds."""
    breaker_s: Seconds = 5.0
    """Seconds between two of these single calls."""


class Kind(Section, frozen=True, tag_field="kind"):
    """Base of every table with a `kind`. Each subclass has a different tag, the value of `kind`."""


def address_fault(url: str, field: str = "url") -> Iterator[str]:
    """Yield a sentence if `url`, the value of `field`, is not an http or https address."""
    if not url.startswith(("http://", "https://")):
        yield f"{field} ({url!r}) must begin with http:// or https://"


class Machine(Section, frozen=True):
    """Hardware of one rank or one rollout actor."""

    gpus: NonNegative = 0
    """GPUs of a process; below 1 if ranks and actors share a GPU."""
