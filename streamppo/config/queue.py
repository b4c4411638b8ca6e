"""The `[queue]` part of the configuration: batches, the allowed lag, and segments."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config.algorithm import Algorithm, Gae, VTrace
from streamppo.config.base import Count, Fraction, Kind, Positive, Processes, Section


class Segments(Section, frozen=True):
    """Settings for training on segments of a completion; each is cut before its oldest token exceeds max_lag."""

    max_tokens: Count = 0
    """Maximum tokens of a segment; 0 is no bound."""
    explained: Fraction = 0.1
    """With max_tokens, the policy is trained only while the critic explains this share of known outcomes."""
    prefix: Literal["attached", "detached"] = "attached"
    """Gradients flow through the prompt and earlier segments ("attached"), or do not ("detached", faster)."""

    def refuses(self, algorithm: Algorithm) -> Iterator[str]:
        """Yield a sentence for every setting of `algorithm` that needs whole completions."""
        advantage = algorithm.advantage
        if not isinstance(advantage, Gae | VTrace):
            yield (
                "queue.segments: the value at the cut stands for the rest of a completion, and algorithm.advantage = "
                f"{advantage.__struct_config__.tag!r} has none: choose gae or vtrace"
            )
        elif algorithm.compares_samples:
            yield (
                f"algorithm.{algorithm.compares_samples} compares the samples of a prompt, and with queue.segments "
                "their parts are trained on in different updates"
            )
        if isinstance(advantage, Gae) and advantage.adaptive_alpha:
            yield "algorithm.advantage.adaptive_alpha needs a completion's length, which is unknown with queue.segments"
        if algorithm.positive_nll:
            yield "algorithm.positive_nll needs correct answers, and a segment has no answer yet"
        if algorithm.teacher.url:
            yield "algorithm.teacher.url scores whole completions, and queue.segments are parts"


class AdaptiveLag(Kind, frozen=True, tag="adaptive"):
    """Adapts the admitted lag to the effective sample size of tokens of each lag (algorithms/lag.py)."""

    at_most: Positive
    """Hard bound on the age of a trained token, in versions."""
    ess: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """The admitted lag falls if the effective sample size of some lag is below this."""


class Queue(Section, frozen=True):
    """The queue of trajectories between rollout and learner."""

    batch_size: Positive = 256
    """Number of trajectories (or segments) in an update."""
    max_lag: Count | AdaptiveLag = 8
    """Hard bound on a trained token's age in versions; 0 is synchronous PPO."""
    ahead: Literal["as_needed", "max_lag"] = "as_needed"
    """Engines sample ahead as far as the learner needs, or always by max_lag."""
    too_old: Literal["mask", "drop", "wait", "windowed", "keep"] = "mask"
    """Tokens beyond max_lag are masked, dropped with their trajectory, kept, or avoided ("wait", "windowed")."""
    samples_per_prompt: Positive = 1
    """Completions of each prompt."""
    max_attempts: Positive = 3
    """Maximum tries of a trajectory."""
    max_failure_rate: Fraction = 0.5
    """The run stops above this share of failed trajectories."""
    segments: Segments | None = None
    """Train on segments of unfinished completions. The critic's value at the cut replaces the rest of the return."""
    admission: Literal["engine", "mean"] = "engine"
    """Bound sampling by the engine's version, or by the learner's version, which bounds only the mean lag."""

    shards: Processes = 1
    """Number of processes that store tokens."""
    standby: bool = False
    """Copy journal and archive to checkpoint.remote before a trajectory or batch counts as stored."""

    @property
    def prefix(self) -> Literal["attached", "detached"]:
        return self.segments.prefix if self.segments else "attached"

    @property
    def least_explained(self) -> float:
        """The share of known outcomes that the critic must explain before the policy is trained; 0 is no condition."""
        return self.segments.explained if self.segments and self.segments.max_tokens else 0.0

    @property
    def attention_settings(self) -> tuple[str, ...]:
        """The settings of this table that need streamppo's attention."""
        return ("queue.segments.prefix = 'detached'",) if self.prefix == "detached" else ()

    @property
    def bound(self) -> int:
        """The largest lag of a trained token, in versions."""
        return self.max_lag.at_most if isinstance(self.max_lag, AdaptiveLag) else self.max_lag

    @property
    def first_lag(self) -> int | None:
        """The admitted lag at the run's start; None if the lag is not adaptive."""
        return 1 if isinstance(self.max_lag, AdaptiveLag) else None

    @property
    def flow_lag(self) -> int:
        """The lag that admission and cuts aim at, and the largest value of an adaptive lag.

        `bound` minus this lag is slack. Segments get one version of slack if `bound` is above 1. With
        too_old = "windowed" the slack is the window, three tenths of the held units (queue/rules/take.py).
        """
        if self.too_old == "windowed":
            return max(min(1, self.bound), (10 * self.bound - 3) // 13)
        return max(1, self.bound - 1) if self.segments else self.bound

    @property
    def cut_age(self) -> int:
        """The lag at which a segment must be cut: `flow_lag`, or 1 less above 2, for engines one version behind."""
        return _with_room(self.flow_lag)

    def aim(self, admitted: int | None) -> int:
        """The lag at which a segment is cut early, if a batch has room for it; 0 (never) if `admitted` is None."""
        return 0 if admitted is None else max(1, _with_room(min(admitted, self.flow_lag)))

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence for every contradiction of admission, too_old and segments.

        Segments need too_old = "mask", because the rest of a completion cannot be sampled again. Only two settings
        together give up the hard bound on lag, so that nobody gives it up by accident.
        """
        if (self.admission == "mean") != (self.too_old == "keep"):
            yield (
                f"admission = {self.admission!r} with too_old = {self.too_old!r}: a max_lag that bounds only the mean "
                "needs both admission = 'mean' and too_old = 'keep'"
            )
        if self.admission == "mean" and isinstance(self.max_lag, AdaptiveLag):
            yield "admission = 'mean' has no bound on age to adapt: give max_lag as a number"
        if self.segments is None:
            return
        if self.bound == 0:
            yield "segments need max_lag of at least 1: a completion continues while its segment is trained on"
        if self.too_old != "mask":
            yield f"too_old = {self.too_old!r} is about whole completions: with segments choose 'mask'"


def _with_room(lag: int) -> int:
    return lag - (lag > 2)
