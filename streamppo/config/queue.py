"""The `[queue]` part of the configuration: batches, the lag that is allowed, and segments."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config.algorithm import Algorithm, Gae, VTrace
from streamppo.config.base import Count, Fraction, Kind, Positive, Section


class Segments(Section, frozen=True):
    """Completions are trained on while they are sampled, a segment at a time."""

    max_tokens: Count = 0
    """A segment is handed over once it has so many tokens; 0 sets no bound."""
    explained: Fraction = 0.1
    """With max_tokens, the policy waits until the critic explains this share of known outcomes; 0: it never waits."""
    just_in_time: bool = True
    """It is handed over before its oldest token is too old to be trained on."""
    prefix: Literal["attached", "detached"] = "attached"
    """The prompt and the segments before are computed with their gradient, or without: the backward pass is shorter."""

    def contradictions(self) -> Iterator[str]:
        """Something has to cut."""
        if not self.max_tokens and not self.just_in_time:
            yield "max_tokens must be above 0 without just_in_time: nothing would ever be cut"

    def refuses(self, algorithm: Algorithm) -> Iterator[str]:
        """A sentence for every choice that needs whole completions."""
        advantage = algorithm.advantage
        if not isinstance(advantage, Gae | VTrace):
            yield (
                "queue.segments: the value at the cut stands for the rest of a completion, and algorithm.advantage = "
                f"{advantage.__struct_config__.tag!r} has none: choose gae or vtrace"
            )
        if isinstance(advantage, Gae) and advantage.adaptive_alpha:
            yield "algorithm.advantage.adaptive_alpha asks for a completion's length, which queue.segments do not know"
        if algorithm.positive_nll:
            yield "algorithm.positive_nll learns right answers, and queue.segments do not know theirs"
        if algorithm.teacher.url:
            yield "algorithm.teacher.url scores whole completions, and queue.segments are parts"


class AdaptiveLag(Kind, frozen=True, tag="adaptive"):
    """The lag that is admitted follows the effective sample size of the data, lag by lag (algorithms/lag.py)."""

    at_most: Positive
    """Hard bound on the age of a trained token, in versions."""
    ess: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """The effective sample size of the tokens of a lag, as a share of them, below which less lag is admitted."""


class Queue(Section, frozen=True):
    """The trajectories that wait between rollout and learner."""

    batch_size: Positive = 256
    """Trajectories of one update; with segments, segments."""
    max_lag: Count | AdaptiveLag = 2
    """Hard bound on the age of a trained token, in versions; 0 is synchronous PPO."""
    too_old: Literal["mask", "drop", "wait", "windowed", "keep"] = "mask"
    """A token beyond max_lag: train the rest, sample the prompt again, hold the flow in issue order or nearly; keep."""
    samples_per_prompt: Positive = 1
    """Completions of each prompt."""
    max_attempts: Positive = 3
    """Tries of one trajectory before it is abandoned, counting failures only."""
    max_failure_rate: Fraction = 0.5
    """A higher share of failed trajectories stops the run."""
    segments: Segments | None = None
    """Train on segments of unfinished completions; the critic's value at the cut stands for the rest."""
    admission: Literal["engine", "mean"] = "engine"
    """Slots open up to max_lag ahead of the asking engine's version, or of the learner's: it bounds the mean alone."""

    shards: Positive = 1
    """Processes that hold the tokens; above 1 the queue has records of trajectories, for very many or wide tokens."""
    standby: bool = False
    """Copy journals and archive to checkpoint.remote before anything is acknowledged: to outlive the queue's disk."""

    @property
    def prefix(self) -> Literal["attached", "detached"]:
        """The context of completions has its gradient, unless segments do without."""
        return self.segments.prefix if self.segments else "attached"

    @property
    def least_explained(self) -> float:
        """The share of known outcomes that the critic has to explain before the policy moves; 0 is none."""
        return self.segments.explained if self.segments and self.segments.max_tokens else 0.0

    @property
    def own_attention(self) -> tuple[str, ...]:
        """The choices here for which the learner changes what attention looks at."""
        return ("queue.segments.prefix = 'detached'",) if self.prefix == "detached" else ()

    @property
    def bound(self) -> int:
        """The greatest age of a trained token, in versions."""
        return self.max_lag.at_most if isinstance(self.max_lag, AdaptiveLag) else self.max_lag

    @property
    def first_lag(self) -> int | None:
        """The lag that is admitted before the data have said anything; None where it is not steered."""
        return 1 if isinstance(self.max_lag, AdaptiveLag) else None

    @property
    def flow_lag(self) -> int:
        """The lag that admission and cuts aim at, at most where it is steered; the rest of the bound is room.

        If possible, segments that are due have a version's time to come. A window has room for three tenths of what is
        held (queue/rules/window.py).
        """
        if self.too_old == "windowed":
            return max(min(1, self.bound), (10 * self.bound - 3) // 13)
        return max(1, self.bound - 1) if self.segments and self.segments.just_in_time else self.bound

    @property
    def cut_age(self) -> int:
        """The age at which a segment is cut: with some room, so that an engine may be a version behind."""
        return _with_room(self.flow_lag)

    def aim(self, admitted: int | None) -> int:
        """The age at which a segment is cut if there is room, where this lag is admitted; 0 where none is steered."""
        return 0 if admitted is None else max(1, _with_room(min(admitted, self.flow_lag)))

    def contradictions(self) -> Iterator[str]:
        """The rest of a segment cannot be sampled again, and with lag 0 there is none while it is trained on.

        The hard bound on age is given up by two words, so that nobody does it by one.
        """
        if (self.admission == "mean") != (self.too_old == "keep"):
            yield (
                f"admission = {self.admission!r} with too_old = {self.too_old!r}: that max_lag bounds the mean alone "
                "takes both, admission = 'mean' and too_old = 'keep'"
            )
        if self.admission == "mean" and isinstance(self.max_lag, AdaptiveLag):
            yield "admission = 'mean' has no bound on age that could be steered: give max_lag as a number"
        if self.segments is None:
            return
        if self.bound == 0:
            yield "segments need max_lag of at least 1: a completion goes on while its segment is trained on"
        if self.too_old != "mask":
            yield f"too_old = {self.too_old!r} is about whole completions: with segments choose 'mask'"


def _with_room(lag: int) -> int:
    return lag - (lag > 2)
