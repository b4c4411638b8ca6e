"""The `[queue]` part of the configuration: batches, the lag that is allowed, and segments."""

from collections.abc import Iterator
from typing import Literal

from streamppo.config.algorithm import Algorithm, Gae, VTrace
from streamppo.config.base import Count, Fraction, Positive, Section
from streamppo.config.engine import EmbeddedEngine, SGLangEngine


class Segments(Section, frozen=True):
    """Completions are trained on while they are sampled, a segment at a time."""

    max_tokens: Count = 0
    """A segment is handed over once it has so many tokens; 0 sets no bound."""
    just_in_time: bool = True
    """It is handed over before its oldest token is too old to be trained on."""

    def contradictions(self) -> Iterator[str]:
        """Something has to cut."""
        if not self.max_tokens and not self.just_in_time:
            yield "max_tokens must be above 0 without just_in_time: nothing would ever be cut"

    def refuses(self, algorithm: Algorithm, engine: EmbeddedEngine | SGLangEngine) -> Iterator[str]:
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
        if refused := engine.refuses_segments():
            yield refused


class Queue(Section, frozen=True):
    """The trajectories that wait between rollout and learner."""

    batch_size: Positive
    """Trajectories of one update; with segments, segments."""
    max_lag: Count
    """Hard bound on the age of a trained token, in versions; 0 is synchronous PPO."""
    too_old: Literal["mask", "drop", "wait"]
    """A token beyond max_lag: train the rest, sample the prompt again, or hold the flow in issue order."""
    samples_per_prompt: Positive = 1
    """Completions of each prompt."""
    max_attempts: Positive = 3
    """Tries of one trajectory before it is abandoned, counting failures only."""
    max_failure_rate: Fraction = 0.5
    """A higher share of failed trajectories stops the run."""
    segments: Segments | None = None
    """Train on segments of unfinished completions; the critic's value at the cut stands for the rest."""

    @property
    def flow_lag(self) -> int:
        """The lag that admission and cuts aim at: if possible, segments that are due have a version's time to come."""
        return max(1, self.max_lag - 1) if self.segments and self.segments.just_in_time else self.max_lag

    @property
    def cut_age(self) -> int:
        """The age at which a segment is cut: with some room, so that an engine may be a version behind."""
        return self.flow_lag - (self.flow_lag > 2)

    def contradictions(self) -> Iterator[str]:
        """The rest of a segment cannot be sampled again, and with lag 0 there is none while it is trained on."""
        if self.segments is None:
            return
        if self.max_lag == 0:
            yield "segments need max_lag of at least 1: a completion goes on while its segment is trained on"
        if self.too_old != "mask":
            yield f"too_old = {self.too_old!r} is about whole completions: with segments choose 'mask'"
