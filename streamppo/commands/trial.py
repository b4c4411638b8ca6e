"""The arguments and the result of `streamppo try`. This module imports neither Ray nor torch."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.errors import ConfigError
from streamppo.terminal import bounded

MOST_TEXT, MOST_BESIDE = 2_000, 200
"""Maximum characters of a printed text, and of a text in a table with several versions."""


class TrialQuestion(NamedTuple):
    """Asks each of `versions` for `n` continuations of a prompt, or of an archived completion from its token `at`.

    `prompt` is a prompt's number in the run, or a text. By default `sample` is the first, and `attempt` the newest.
    """

    versions: tuple[int, ...]
    prompt: str
    at: int = 0
    sample: int | None = None
    attempt: int | None = None
    n: int = 16

    @property
    def number(self) -> int | None:
        """The prompt's number in the run; None if `prompt` is a text."""
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
        if isinstance(config.environment, AgentEnvironment):
            raise ConfigError(
                "this run trains an agent (environment.kind): the state of the agent's program is not recorded, so it "
                "cannot continue from a token"
            )


class TrialSample(msgspec.Struct, frozen=True):
    """A continuation: its `text`, and its number of `tokens`. A failed continuation has a `reason` and no reward."""

    reward: float | None
    tokens: int = 0
    text: str = ""
    finish: str = ""
    reason: str = ""


class VersionTrial(msgspec.Struct, frozen=True):
    """The continuations of `version`, which has a checkpoint, or was replayed from a lower version `begin`.

    `mean` is the mean of the rewards, and `error` its standard error. `value` is the value at token `at` by the
    version's critic. If `version` alone sampled the archived completion, it samples the completion again with the run's
    random numbers: `is_same` is True if the tokens are equal; otherwise `differs` is the first different token.
    """

    version: int
    begin: int
    mean: float | None
    error: float | None
    value: float | None
    continuations: tuple[TrialSample, ...]
    is_same: bool | None = None
    differs: int | None = None


class Trial(msgspec.Struct, frozen=True):
    """The result: the archived completion up to the token, and each version's continuations.

    `update` trained on the archived completion, and `recorded_value` is the critic's value at token `at` before it.
    `difference` is the mean reward of the last version minus that of the first, over pairs with the same random
    numbers.
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
    """Return the result in words, without the continuations."""
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
        pair = f"version {result.versions[-1].version} minus {result.versions[0].version}"
        error = _error(result.difference_error)
        lines.append(f"{pair}: {result.difference:.3f}{error}, in pairs of the same random numbers")
    return lines


def _version_sentences(tried: VersionTrial) -> Iterator[str]:
    scored = sum(continuation.reward is not None for continuation in tried.continuations)
    origin = "" if tried.begin == tried.version else f" (replayed from version {tried.begin})"
    mean = "all rewards failed"
    if tried.mean is not None:
        mean = f"mean reward {tried.mean:.3f}{_error(tried.error)} of {scored}"
    value = "" if tried.value is None else f", its critic's value {tried.value:.3f}"
    yield f"version {tried.version}{origin}: {mean}{value}"
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
    """Return a table of the continuations: a column for each version, with its continuation i in row i."""
    most = MOST_TEXT if len(result.versions) == 1 else MOST_BESIDE
    rows = zip(*(version.continuations for version in result.versions), strict=True)
    return [[_cell(continuation, most) for continuation in row] for row in rows]


def _cell(continuation: TrialSample, most: int) -> str:
    if continuation.reward is None:
        return f"-  {bounded(continuation.text, most)!r} ({bounded(continuation.reason, most)})"
    cut = " (cut off)" if continuation.finish == "length" else ""
    return f"{continuation.reward:g}  {bounded(continuation.text, most)!r}{cut}"
