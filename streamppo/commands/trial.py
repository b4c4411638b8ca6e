"""The question of `streamppo try`, and its answer. Needs neither Ray nor torch."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.errors import ConfigError
from streamppo.terminal import bounded

MOST_TEXT, MOST_BESIDE = 2_000, 200
"""The most characters of a single text, and of each text of several versions."""


class TrialQuestion(NamedTuple):
    """`n` continuations by each of `versions`, from token `at` of an archived completion, or of the text of a prompt.

    `prompt` is a number, or a text. The defaults of `sample` and `attempt` are the first, and its newest.
    """

    versions: tuple[int, ...]
    prompt: str
    at: int = 0
    sample: int | None = None
    attempt: int | None = None
    n: int = 16

    @property
    def number(self) -> int | None:
        """The number of a prompt of the run; None for a text."""
        return int(self.prompt) if self.prompt.isdecimal() and self.prompt.isascii() else None

    def refuse(self) -> None:
        """Raise `ConfigError` for contradictory or missing arguments."""
        if not self.prompt:
            raise ConfigError("--prompt is the number of a prompt, as for `inspect --prompt`, or a text")
        if not self.versions:
            raise ConfigError("--version is missing: the version that samples, or several")
        if len(set(self.versions)) != len(self.versions):
            raise ConfigError("--version: a version is named twice")
        if self.number is None and (self.at or self.sample is not None or self.attempt is not None):
            raise ConfigError("--at, --sample and --attempt belong to an archived completion, and --prompt is a text")

    def refuse_agent(self, config: Config) -> None:
        """Raise `ConfigError` for a run of an agent."""
        if isinstance(config.environment, AgentEnvironment):
            raise ConfigError(
                "this run trains an agent (environment.kind): the state of the agent's program is not recorded, so it "
                "cannot continue from a token"
            )


class Continued(msgspec.Struct, frozen=True):
    """A continuation: its `text`, and its number of `tokens`; after a failure a `reason` and no reward."""

    reward: float | None
    tokens: int = 0
    text: str = ""
    finish: str = ""
    reason: str = ""


class VersionTrial(msgspec.Struct, frozen=True):
    """The continuations of a version, replayed from version `begin`, which is `version` if it has a checkpoint.

    `mean` is the mean of their rewards, `error` its standard error. `value` is that of the version's critic at the
    token. `is_same`: with the run's random numbers it sampled the archived completion again, else up to token
    `differs`; None if other versions sampled a part of that completion.
    """

    version: int
    begin: int
    mean: float | None
    error: float | None
    value: float | None
    continuations: tuple[Continued, ...]
    is_same: bool | None = None
    differs: int | None = None


class Trial(msgspec.Struct, frozen=True):
    """The answer: the run's completion up to the token, and each version's continuations.

    `recorded_value` is the critic's at the start of the update to version `update`. `difference` is the mean reward of
    the second version minus that of the first, over pairs with the same random numbers.
    """

    prompt: str
    at: int
    before: str
    versions: tuple[VersionTrial, ...]
    number: int | None = None
    sample: int | None = None
    attempt: int | None = None
    update: int | None = None
    archived: str = ""
    reward: float | None = None
    recorded_value: float | None = None
    difference: float | None = None
    difference_error: float | None = None


def sentences(result: Trial) -> list[str]:
    """The answer in words, without the completions."""
    name = "" if result.number is None else f" {result.number}"
    lines = [f"prompt{name}: {bounded(result.prompt, MOST_TEXT)!r}"]
    if result.update is not None:
        before = f"{bounded(result.before, MOST_TEXT)!r} | " if result.at else ""
        reward = "cut" if result.reward is None else f"reward {result.reward:g}"
        value = "" if result.recorded_value is None else f", recorded value {result.recorded_value:.3f}"
        archived = f"{before}{bounded(result.archived, MOST_TEXT)!r}, {reward}{value}"
        lines.append(f"sample {result.sample} of update {result.update}, from token {result.at}: {archived}")
    lines += [line for version in result.versions for line in _version_sentences(version)]
    if result.difference is not None:
        pair = f"version {result.versions[-1].version} less {result.versions[0].version}"
        error = _error(result.difference_error)
        lines.append(f"{pair}: {result.difference:.3f}{error}, in pairs of the same random numbers")
    return lines


def _version_sentences(tried: VersionTrial) -> Iterator[str]:
    scored = sum(continuation.reward is not None for continuation in tried.continuations)
    origin = "" if tried.begin == tried.version else f" (replayed from version {tried.begin})"
    mean = "no reward" if tried.mean is None else f"mean reward {tried.mean:.3f}{_error(tried.error)}"
    value = "" if tried.value is None else f", its critic's value {tried.value:.3f}"
    yield f"version {tried.version}{origin}: {mean} of {scored}{value}"
    if tried.is_same is not None:
        if tried.is_same:
            repetition = "the archived completion, token for token"
        elif tried.differs is None:
            repetition = "a failure, so it is not compared"
        else:
            repetition = f"another completion from token {tried.differs} on: machine, threads or software differ"
        yield f"version {tried.version} with the random numbers of the run: {repetition}"


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.3f}"


def cells(result: Trial) -> list[list[str]]:
    """A row for each number of a continuation: the reward and the text of each version's continuation."""
    most = MOST_TEXT if len(result.versions) == 1 else MOST_BESIDE
    rows = zip(*(version.continuations for version in result.versions), strict=True)
    return [[_cell(continuation, most) for continuation in row] for row in rows]


def _cell(continuation: Continued, most: int) -> str:
    if continuation.reward is None:
        return f"-  {bounded(continuation.text, most)!r} ({bounded(continuation.reason, most)})"
    cut = " (cut off)" if continuation.finish == "length" else ""
    return f"{continuation.reward:g}  {bounded(continuation.text, most)!r}{cut}"
