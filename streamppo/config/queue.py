"""The `[queue]` part of the configuration: batches, the allowed lag, and segments."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config.algorithm import Algorithm, Gae, VTrace
from streamppo.config.base import Count, Fraction, Kind, Positive, Processes, Section


class Segments(Section, frozen=True):
    """Completions are trained on while they are sampled, one segment at a time."""

    max_tokens: Count = 0
    """Tokens at which a segment is cut; 0 is no bound."""
    explained: Fraction = 0.1
    """With max_tokens, the policy waits until the critic explains this share of known outcomes."""
    just_in_time: bool = True
    """Cut a segment before its oldest token is too old."""
    prefix: Literal["attached", "detached"] = "attached"
    """Prompt and earlier segments have a gradient, or none, which is faster."""

    def contradictions(self) -> Iterator[str]:
        """At least one rule must cut segments."""
        if not self.max_tokens and not self.just_in_time:
            yield "max_tokens must be above 0 without just_in_time: nothing would ever be cut"

    def refuses(self, algorithm: Algorithm) -> Iterator[str]:
        """Yield a sentence for every choice of `algorithm` that needs whole completions."""
        advantage = algorithm.advantage
        if not isinstance(advantage, Gae | VTrace):
            yield (
                "queue.segments: the value at the cut stands for the rest of a completion, and algorithm.advantage = "
                f"{advantage.__struct_config__.tag!r} has none: choose gae or vtrace"
            )
        if isinstance(advantage, Gae) and advantage.adaptive_alpha:
            yield "algorithm.advantage.adaptive_alpha needs a completion's length, which is unknown with queue.segments"
        if algorithm.positive_nll:
            yield "algorithm.positive_nll needs correct answers, and a segment has no answer yet"
        if algorithm.teacher.url:
            yield "algorithm.teacher.url scores whole completions, and queue.segments are parts"


class AdaptiveLag(Kind, frozen=True, tag="adaptive"):
    """The admitted lag follows the effective sample size of the data, lag by lag (algorithms/lag.py)."""

    at_most: Positive
    """Hard bound on the age of a trained token, in versions."""
    ess: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Less lag is admitted below this effective sample size of a lag's tokens."""


class Queue(Section, frozen=True):
    """The queue of trajectories between rollout and learner."""

    batch_size: Positive = 256
    """Trajectories (or segments) of an update."""
    max_lag: Count | AdaptiveLag = 8
    """Hard bound on a trained token's age in versions; 0 is synchronous PPO."""
    ahead: Literal["as_needed", "max_lag"] = "as_needed"
    """Engines sample ahead as far as the learner needs so as not to wait, or always to max_lag."""
    too_old: Literal["mask", "drop", "wait", "windowed", "keep"] = "mask"
    """Tokens beyond max_lag: mask, sample again, prevent by (nearly) keeping issue order, or keep."""
    samples_per_prompt: Positive = 1
    """Completions of each prompt."""
    max_attempts: Positive = 3
    """Failed tries before a trajectory is abandoned."""
    max_failure_rate: Fraction = 0.5
    """A higher share of failures stops the run."""
    segments: Segments | None = None
    """Train on segments of unfinished completions; the critic's value at the cut replaces the rest's return."""
    admission: Literal["engine", "mean"] = "engine"
    """Slots open max_lag ahead of the engine's version, or the learner's, which bounds only the mean lag."""

    shards: Processes = 1
    """Processes that store tokens; above 1 the queue keeps only records."""
    standby: bool = False
    """Copy journals and archive to checkpoint.remote before acknowledging."""

    @property
    def prefix(self) -> Literal["attached", "detached"]:
        """Whether earlier tokens of a completion have a gradient; "attached" without segments."""
        return self.segments.prefix if self.segments else "attached"

    @property
    def least_explained(self) -> float:
        """The share of known outcomes that the critic must explain before the policy moves; 0 is none."""
        return self.segments.explained if self.segments and self.segments.max_tokens else 0.0

    @property
    def own_attention(self) -> tuple[str, ...]:
        """The choices here that need the learner's own attention."""
        return ("queue.segments.prefix = 'detached'",) if self.prefix == "detached" else ()

    @property
    def bound(self) -> int:
        """The largest lag of a trained token, in versions."""
        return self.max_lag.at_most if isinstance(self.max_lag, AdaptiveLag) else self.max_lag

    @property
    def first_lag(self) -> int | None:
        """The admitted lag before the first measurement; None if the lag is not adaptive."""
        return 1 if isinstance(self.max_lag, AdaptiveLag) else None

    @property
    def flow_lag(self) -> int:
        """The target lag of admission and cuts, an upper bound if adaptive; `bound` minus it is slack.

        Just-in-time segments get one version of slack if possible. A window gets three tenths of the held units
        (queue/rules/take.py).
        """
        if self.too_old == "windowed":
            return max(min(1, self.bound), (10 * self.bound - 3) // 13)
        return max(1, self.bound - 1) if self.segments and self.segments.just_in_time else self.bound

    @property
    def cut_age(self) -> int:
        """The lag at which a segment is cut: with slack, because an engine may be one version behind."""
        return _with_room(self.flow_lag)

    def aim(self, admitted: int | None) -> int:
        """The lag at which a segment is cut if there is room, given the admitted lag; 0 if it is not adaptive."""
        return 0 if admitted is None else max(1, _with_room(min(admitted, self.flow_lag)))

    def contradictions(self) -> Iterator[str]:
        """Rules of admission and of segments.

        Segments need a lag of at least 1 and too_old = "mask": the rest of a completion cannot be resampled. It takes
        two settings to give up the hard bound on lag, so that this does not happen by accident.
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
