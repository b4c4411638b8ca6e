"""The `[reward]` part of the configuration: the source of scores. docs/rewards.md has examples."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from streamppo.config.base import Calls, Count, NonNegative, Positive, PositiveFloat, Section, address_fault

Argument = str | int | float | bool


class Limits(Calls, frozen=True):
    """Fields of every scorer: its share of the reward, and bounds on its calls."""

    weight: float = 1.0
    """The score is multiplied by this."""
    sources: tuple[str, ...] = ()
    """The data sources whose prompts it scores; none named is all."""


class Batched(Limits, frozen=True):
    """Scorers that take several trajectories at once."""

    batch_size: Positive = 16
    """Trajectories in one call of a batched function, or in one forward of a model, at most."""


class FunctionScorer(Batched, frozen=True, kw_only=True, tag_field="kind", tag="function"):
    """A function or class of the user's."""

    function: str
    """`package.module:name` or `path/file.py:name` of a function, or of a class whose instances are called."""
    arguments: dict[str, Argument] = msgspec.field(default_factory=dict[str, Argument])
    """Keyword arguments of the class's constructor, or of every call of the function."""
    where: Literal["auto", "actor", "process"] = "auto"
    """In the actor's event loop or in killable processes; auto leaves only our own async scorers in the actor."""
    processes: Positive = 2
    """Processes for a sync function; an async one has one process, with all its calls in flight."""
    memory_mib: Positive = 512
    """Memory that one process may allocate after it has imported the function (Linux)."""


class ModelScorer(Batched, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """A Hugging Face sequence classification model, in a Ray actor of its own that all rollout actors share."""

    path: str
    """A local folder or hub name."""
    label: Count = 0
    """Number of the output that is the score."""
    max_tokens: Positive = 4096
    """A longer text fails its trajectory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters and activations."""
    threads: Positive = 1
    """CPU threads."""
    gpus: NonNegative = 0
    """GPUs."""


class Remote(Limits, frozen=True, kw_only=True):
    """Scorers behind HTTP."""

    url: str
    """Address of the service, which gets a POST; for a judge the address up to /chat/completions: http://localhost:8000/v1."""
    key_env: str = ""
    """The environment variable that holds a bearer token."""

    def contradictions(self) -> Iterator[str]:
        """An address says how it is reached."""
        yield from address_fault(self.url)


class ServiceScorer(Remote, frozen=True, kw_only=True, tag_field="kind", tag="service"):
    """A scorer behind HTTP: gets prompt, completion and columns as JSON, answers {"score": number}."""


class JudgeScorer(Remote, frozen=True, kw_only=True, tag_field="kind", tag="judge"):
    """A language model behind an OpenAI-compatible /chat/completions, asked for a number."""

    model: str
    """The model's name there."""
    question: str
    """The question; {prompt}, {completion} and the names of columns in braces are filled in."""
    pattern: str = r"(-?\d+(?:\.\d+)?)\s*$"
    """Place of the number in its answer: a regular expression with one group."""
    scale: PositiveFloat = 1.0
    """The number is divided by this."""
    max_tokens: Positive = 1024
    """Tokens of its answer at most."""


Scorer = FunctionScorer | ModelScorer | ServiceScorer | JudgeScorer


class Reward(Section, frozen=True):
    """The scorers of a run. `[reward] function = ...` in a file is short for `[reward.scorers.reward]`."""

    scorers: dict[str, Scorer] = msgspec.field(default_factory=dict[str, Scorer])
    """Scorers by name; the scores of several are logged as reward_NAME."""
    combine: Literal["sum", "model_first"] = "sum"
    """The weighted sum of all scores; or, where a model or judge scores a trajectory, of its scores alone."""
    correct_at: float = 1.0
    """Evaluation counts a completion as correct when its reward reaches this."""

    def models(self) -> dict[str, ModelScorer]:
        """The reward models among the scorers."""
        return {name: scorer for name, scorer in self.scorers.items() if isinstance(scorer, ModelScorer)}
