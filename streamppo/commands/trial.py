"""The question of `streamppo try`, and its answer. Needs neither Ray nor torch."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.errors import ConfigError
from streamppo.terminal import bounded

MOST_TEXT, MOST_BESIDE = 2_000, 200
"""Maximum characters shown of one text, and of each text in a table."""


class TrialQuestion(NamedTuple):
    """`n` continuations by each of `versions`, from token `at` of an archived completion, or of the text of a prompt.

    `prompt` is a number, or a text. Without `sample` and `attempt` it is the newest attempt at the first sample.
    """

    versions: tuple[int, ...]
    prompt: str
    at: int = 0
    sample: int | None = None
    attempt: int | None = None
    n: int = 16

    @property
    def number(self) -> int | None:
        """The number of a prompt of the run; None of a text."""
        return int(self.prompt) if self.prompt.isdecimal() and self.prompt.isascii() else None

    def refuse(self) -> None:
        """Raise `ConfigError` for contradictory or missing arguments."""
        if not self.prompt:
            raise ConfigError("--prompt is the number of a prompt, as `inspect --prompt` takes it, or a text")
        if not self.versions:
            raise ConfigError("--version is the version that samples, or several")
        if len(set(self.versions)) != len(self.versions):
            raise ConfigError("--version: each version once")
        if self.number is None and (self.at or self.sample is not None or self.attempt is not None):
            raise ConfigError("--at, --sample and --attempt are of an archived completion, and --prompt is a text")

    def refuse_agent(self, config: Config) -> None:
        """Raise `ConfigError` for a run of an agent."""
        if isinstance(config.environment, AgentEnvironment):
            raise ConfigError(
                "this run trains an agent (environment.kind): the state of its program is not recorded, so no "
                "run of it can be continued from a token"
            )


class Continued(msgspec.Struct, frozen=True):
    """One continuation: `text` and `tokens` after the token; a failed one has no reward, and a `reason`."""

    reward: float | None
    tokens: int = 0
    text: str = ""
    finish: str = ""
    reason: str = ""


class VersionTrial(msgspec.Struct, frozen=True):
    """The continuations of a version, which was replayed from version `begin`: its own number for a checkpoint.

    `mean` is that of their rewards, `error` its standard error. `value` is the version's critic at the token.
    `is_same`: with the run's random numbers it sampled the archived completion again, up to token `differs`; None if
    other versions sampled a part of that.
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
    """The answer: the completion up to the token, as the run had it, and each version's continuations.

    `recorded_value` is the critic's at the start of the update to version `update`. `difference` is the second
    version's mean reward less the first's over pairs with the same random numbers.
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
    lines += [line for one in result.versions for line in _of_version(one)]
    if result.difference is not None:
        pair = f"version {result.versions[-1].version} less {result.versions[0].version}"
        error = _error(result.difference_error)
        lines.append(f"{pair}: {result.difference:.3f}{error}, in pairs of the same random numbers")
    return lines


def _of_version(tried: VersionTrial) -> Iterator[str]:
    scored = sum(each.reward is not None for each in tried.continuations)
    origin = "" if tried.begin == tried.version else f" (replayed from version {tried.begin})"
    mean = "no reward" if tried.mean is None else f"mean reward {tried.mean:.3f}{_error(tried.error)}"
    value = "" if tried.value is None else f", its critic's value {tried.value:.3f}"
    yield f"version {tried.version}{origin}: {mean} of {scored}{value}"
    if tried.is_same is not None:
        other = f"another completion from token {tried.differs} on: the machine, the threads or the software differ"
        failed = "it could not be sampled again, so it is not compared"
        again = (
            "the archived completion, token for token" if tried.is_same else failed if tried.differs is None else other
        )
        yield f"version {tried.version} with the random numbers of the run: {again}"


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.3f}"


def cells(result: Trial) -> list[list[str]]:
    """A row for each number of a continuation, with the reward and the text of each version's."""
    most = MOST_TEXT if len(result.versions) == 1 else MOST_BESIDE
    pairs = zip(*(one.continuations for one in result.versions), strict=True)
    return [[_cell(one, most) for one in pair] for pair in pairs]


def _cell(one: Continued, most: int) -> str:
    if one.reward is None:
        return f"-  {bounded(one.text, most)!r} ({bounded(one.reason, most)})"
    cut = " (cut off)" if one.finish == "length" else ""
    return f"{one.reward:g}  {bounded(one.text, most)!r}{cut}"
