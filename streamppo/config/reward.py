"""The `[reward]` part of the configuration: the source of scores. docs/rewards.md has examples."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from streamppo.config.base import Calls, Count, NonNegative, Positive, PositiveFloat, Section, address_fault

Argument = str | int | float | bool


class Limits(Calls, frozen=True):
    """Fields of every scorer: its weight in the reward, and bounds on its calls."""

    weight: float = 1.0
    """Factor on the score."""
    sources: tuple[str, ...] = ()
    """Data sets whose trajectories are scored; empty: all."""


class Batched(Limits, frozen=True):
    """Scorers that take several trajectories at once."""

    batch_size: Positive = 16
    """Maximum trajectories of one call or forward pass."""


class FunctionScorer(Batched, frozen=True, kw_only=True, tag_field="kind", tag="function"):
    """A user's function or class."""

    function: str
    """A function or class."""
    arguments: dict[str, Argument] = msgspec.field(default_factory=dict[str, Argument])
    """Keyword arguments of the class's constructor, or of every call of the function."""
    where: Literal["auto", "actor", "process"] = "auto"
    """Run calls in the rollout actor or in separate processes; "auto" is "actor" only for streamppo's async scorers."""
    processes: Positive = 2
    """Processes of a sync function; an async function has one."""
    memory_mib: Positive = 512
    """Memory of one process after the import (Linux)."""


class ModelScorer(Batched, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """A Hugging Face sequence classification model in one Ray actor, which all rollout actors call."""

    path: str
    """A local folder or hub name."""
    label: Count = 0
    """Index of the output that is the score."""
    max_tokens: Positive = 4096
    """Maximum tokens of a text; a longer text fails its trajectory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations."""
    threads: Positive = 1
    """CPU threads."""
    gpus: NonNegative = 0
    """GPUs."""


class Remote(Limits, frozen=True, kw_only=True):
    """Scorers behind HTTP."""

    url: str
    """Address of the service, or of a judge without /chat/completions: http://localhost:8000/v1."""
    key_env: str = ""
    """Environment variable with a bearer token."""

    def contradictions(self) -> Iterator[str]:
        yield from address_fault(self.url)


class ServiceScorer(Remote, frozen=True, kw_only=True, tag_field="kind", tag="service"):
    """A scorer behind HTTP that gets prompt, completion and columns as JSON, and answers {"score": number}."""

    form: Literal["streamppo", "openrlhf"] = "streamppo"
    """Form of requests and answers; "openrlhf" is that of OpenRLHF's remote reward models."""


class JudgeScorer(Remote, frozen=True, kw_only=True, tag_field="kind", tag="judge"):
    """A language model that answers a question about the completion with a number, at an OpenAI-compatible endpoint."""

    model: str
    """The model's name at the endpoint."""
    question: str
    """The question, with {prompt}, {completion} and columns in braces."""
    pattern: str = r"(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+)?[\s.*_)}\]\"'`]*$"
    """Regular expression whose first group is the number. The default reads a last "8", "8/10", "**8**" or "8."."""
    scale: PositiveFloat = 1.0
    """The score is the number divided by this."""
    max_tokens: Positive = 1024
    """Maximum tokens of the answer."""


Scorer = FunctionScorer | ModelScorer | ServiceScorer | JudgeScorer


class Reward(Section, frozen=True):
    """The scorers of a run. In a file, `[reward] function = ...` is short for `[reward.scorers.reward]`."""

    scorers: dict[str, Scorer] = msgspec.field(default_factory=dict[str, Scorer])
    """Scorers by name. With several scorers, each score is logged as reward_NAME."""
    combine: Literal["sum", "model_first"] = "sum"
    """Sum all weighted scores; "model_first" sums only those of models, judges and services, if there are any."""
    correct_at: float = 1.0
    """A completion counts as correct from this reward on."""

    def models(self) -> dict[str, ModelScorer]:
        """Return the scorers that are reward models, by name."""
        return {name: scorer for name, scorer in self.scorers.items() if isinstance(scorer, ModelScorer)}
