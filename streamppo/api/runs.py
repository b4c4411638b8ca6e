"""The Python interface: start, resume and read runs, and call commands on them.

A run trains in a separate process, so the script's signal handlers, Ray connection and memory are not affected. `fork`
and the functions after `fork` run commands with `--json`, also in separate processes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from streamppo.api import custom_reward, data_rows, notebook
from streamppo.api.messages import RunRequest
from streamppo.api.parent import drive, run_command
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import ConfigError, StreamppoError
from streamppo.learner.checkpoint import manifest
from streamppo.telemetry import metrics_file, summary

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingImports]

    from streamppo.commands.bisection import Answer
    from streamppo.commands.trial import Trial
    from streamppo.commands.verification import Verification
    from streamppo.driver.report import RunDifference
    from streamppo.queue.store.archive import Archive


class Run:
    """A run in its folder. Every access to a property reads the files again, also while the run is in progress."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The absolute path of the run's folder."""

    def __repr__(self) -> str:
        return f"streamppo.open({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return notebook.charts(self.folder)

    @property
    def config(self) -> Config:
        """The run's configuration, with which `resume` continues."""
        return configfile.load(self.folder / configfile.CONFIG)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A dictionary for each update, in order: every metric of metrics.jsonl, and the new version under `update`.

        `accuracy` is the held-out accuracy of the version, if the version was evaluated.
        """
        lines = metrics_file.read(self.folder)
        accuracy = dict(summary.line_totals(lines)["evaluations"])
        rows: list[dict[str, float]] = []
        for line in summary.updates_in_order(lines):
            version = metrics_file.version_of(line)
            numbers = metrics_file.numbers(line)
            row = {"update": version} | {
                name: value for name, value in numbers.items() if name not in ("update", "remade")
            }
            if (held_out := accuracy.get(version)) is not None:
                row["accuracy"] = held_out
            rows.append(row)
        return rows

    def dataframe(self) -> "pandas.DataFrame":
        """`metrics` as a DataFrame with a row for each update. Raises `StreamppoError` if pandas is not installed."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise StreamppoError(
                "Run.dataframe() needs pandas: `pip install pandas`; Run.metrics is the same as a list"
            ) from error
        return pandas.DataFrame(self.metrics).set_index("update", drop=False)

    @property
    def summary(self) -> dict[str, object]:
        """The content of summary.json or, if the run is in progress or was killed, the numbers known so far."""
        from streamppo.commands.look.summary import current_summary

        return current_summary(self.folder)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folder of each complete checkpoint by its version, with the oldest first."""
        return {int(path.name): path for path in manifest.complete(self.folder / "checkpoints")}

    @property
    def archive(self) -> "Archive":
        """All batches that were trained on: `versions()`, `batch(version)`, `columns(version)`, `table(version)`.

        Raises `JournalError` if there is no archive yet.
        """
        from streamppo.queue.store import archive

        return archive.open(self.folder)

    def difference(self, other: "Run") -> "RunDifference | None":
        """Compare the rewards of this run and `other` on the same prompts; None if the runs have no common version.

        `rows` has differences (this run minus `other`) after the last common version: over all updates, then parts.
        """
        from streamppo.driver import report

        return next(iter(report.differences([other.folder, self.folder])), None)

    @property
    def is_running(self) -> bool:
        from streamppo.driver import run_folder

        return run_folder.is_running(self.folder)


def run(
    config: str | PathLike[str] | Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    reward: Callable[..., object] | None = None,
    data: Iterable[Mapping[str, object]] | None = None,
    runs: str | PathLike[str] = "runs",
) -> Run:
    """Train with the configuration `config` and `overrides` ("section.field=value"). Makes a new folder in `runs`.

    `config` is a file, or a dict of fields such as {"learner.lr": 3e-4}. A `reward` replaces the configuration's
    `reward.function`, and the rows `data` replace its `task.data`. The rows, and the source of a reward that is defined
    in the script or notebook, are written to the run's folder. Ctrl-C ends the run with a last checkpoint, and raises
    `KeyboardInterrupt`. Raises the `StreamppoError` that `streamppo run` would report.
    """
    source = None if reward is None else custom_reward.write_out(reward)
    request = RunRequest(overrides=_overrides(overrides), runs=str(Path(runs)), reward=source)
    if isinstance(config, Mapping):
        request = structs.replace(request, fields=_fields(config))
    else:
        request = structs.replace(request, config=str(Path(config)))
    if data is None:
        return _drive(request)
    with TemporaryDirectory() as aside:
        file = Path(aside) / configfile.DATA
        data_rows.write(data, file)
        return _drive(structs.replace(request, data=str(file)))


def resume(folder: str | PathLike[str], overrides: Sequence[str] = (), *, accept_changes: bool = False) -> Run:
    """Continue the run in `folder` with its configuration and `overrides`.

    With `accept_changes` the run continues even if the data or the model have changed. Raises the same errors as `run`.
    """
    existing = str(configfile.existing(Path(folder)))
    return _drive(RunRequest(folder=existing, overrides=_overrides(overrides), accept_changes=accept_changes))


def open(folder: str | PathLike[str]) -> Run:
    """Return the run in `folder` without starting a process. Raises `CheckpointError` if there is no run."""
    return Run(configfile.existing(Path(folder)))


def _drive(request: RunRequest) -> Run:
    return Run(drive(request, notebook.watcher()))


# --- commands on a run -----------------------------------------------------------------------------------------


def fork(
    folder: str | PathLike[str],
    at: int,
    changes: Sequence[str] = (),
    *,
    name: str = "",
    runs: str | PathLike[str] = "runs",
) -> Run:
    """Make a new run in `runs` that begins with version `at` of the run in `folder`, and has `changes` to its settings.

    `resume` continues the fork. Raises the `StreamppoError` of the command.
    """
    words = ["fork", str(configfile.existing(Path(folder))), "--at", str(at), "--runs", str(Path(runs)), "--json"]
    words += ["--name", name] if name else []
    return Run(Path(cast(dict[str, str], run_command(*words, *_option("--set", _overrides(changes))))["folder"]))


def bisect(
    folder: str | PathLike[str],
    metric: str = "",
    *,
    above: float | None = None,
    below: float | None = None,
    test: str | PathLike[str] | None = None,
    changes: Sequence[str] = (),
) -> "Answer":
    """Find the first version of the run in `folder` at which `metric` is above or below a bound or a test returns True.

    The file `test` contains the function `test`. With `changes`, versions are replayed under another configuration.
    Raises the `StreamppoError` of the command.
    """
    from streamppo.commands.bisection import Answer

    words = ["bisect", str(configfile.existing(Path(folder))), "--json"]
    options = {"--metric": metric or None, "--above": above, "--below": below, "--test": test}
    # Without "=", a negative number would be taken for an option.
    words += [f"{option}={value}" for option, value in options.items() if value is not None]
    return Answer(**cast(dict[str, Any], run_command(*words, *_option("--set", _overrides(changes)))))


def try_versions(
    folder: str | PathLike[str],
    versions: Sequence[int],
    prompt: int | str,
    *,
    at: int = 0,
    sample: int | None = None,
    n: int = 16,
) -> "Trial":
    """Sample `n` continuations of a completion or a prompt with each of `versions` of the run in `folder`.

    If `prompt` is a text, its completions are sampled. If `prompt` is a prompt's number, its archived `sample` (by
    default the first) is continued from token `at`. Raises the `StreamppoError` of the command.
    """
    from streamppo.commands.trial import Trial

    words = ["try", str(configfile.existing(Path(folder))), "--json", "--version", *map(str, versions)]
    options = {"--prompt": prompt, "--at": at, "-n": n, "--sample": sample}
    # Without "=", a text that begins with "-" would be taken for an option.
    words += [f"{option}={value}" for option, value in options.items() if value is not None]
    return msgspec.convert(run_command(*words), Trial)


def verify(folder: str | PathLike[str], updates: int = 1, expect: str = "") -> "Verification":
    """Compare the records of the run in `folder` with each other, and replay `updates` random updates.

    `expect` is the digest that the run must have. Raises the `StreamppoError` of the command.
    """
    from streamppo.commands.verification import Fault, Verification

    words = [str(configfile.existing(Path(folder))), "--updates", str(updates), "--expect", expect, "--json"]
    result = cast(dict[str, Any], run_command("verify", *words))
    return Verification(**{**result, "faults": [Fault(**fault) for fault in result["faults"]]})


# --- one update ------------------------------------------------------------------------------------------------


class BundleReplay(NamedTuple):
    """A replayed update: the new version's `digest`, the `recorded` digest of the run, and reasons why they may differ.

    `tokens` has columns (docs/bundle.md) with an entry for each token of each pass over a row.
    """

    digest: str
    recorded: str
    same: bool
    differences: list[str]
    metrics: dict[str, float]
    tokens: dict[str, NDArray[np.generic]]


def bundle(
    folder: str | PathLike[str],
    update: int,
    to: str | PathLike[str] | None = None,
    *,
    rows: Sequence[int] = (),
    adapter: bool = False,
) -> Path:
    """Write `update` of the run in `folder` to a file, and return its path. Raises the command's `StreamppoError`."""
    words = ["bundle", str(configfile.existing(Path(folder))), "--update", str(update), "--json"]
    words += ["--to", str(to)] if to is not None else []
    words += _option("--rows", rows)
    return Path(cast(Mapping[str, str], run_command(*words, *["--adapter"] * adapter))["file"])


def replay(file: str | PathLike[str], rows: Sequence[int] = (), changes: Sequence[str] = ()) -> BundleReplay:
    """Replay the update in the bundle `file`, with `changes` to the configuration.

    The result has the tokens of `rows` (default: all); missing numbers are NaN. Raises the command's `StreamppoError`.
    """
    words = ["replay", str(Path(file)), "--json", *_option("--rows", rows), *_option("--set", _overrides(changes))]
    result = cast(dict[str, Any], run_command(*words))
    fields = {name: result[name] for name in BundleReplay._fields}
    return BundleReplay(**{**fields, "tokens": _arrays(result["tokens"])})


def _arrays(columns: Mapping[str, Sequence[Any]]) -> dict[str, NDArray[np.generic]]:
    """Return the columns as arrays of float32 or integers, with NaN for null."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, column in columns.items():
        values = [np.nan if value is None else value for value in column]
        arrays[name] = np.array(values, np.float32 if any(isinstance(value, float) for value in values) else None)
    return arrays


def _option(name: str, values: Sequence[object]) -> list[str]:
    return [name, *map(str, values)] if values else []


def _fields(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return fields of a configuration as plain values, with texts for paths. Raises `ConfigError` for other types."""

    def text(value: object) -> str:
        if isinstance(value, PathLike):
            return fspath(cast(PathLike[str], value))
        raise ConfigError(f"config: a field cannot be a {type(value).__name__}: {value!r}")

    return cast(dict[str, Any], msgspec.to_builtins(dict(fields), enc_hook=text))


def _overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides. Raises `ConfigError` for a single text, whose letters would be taken for overrides."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of texts, [{overrides!r}], not a text")
    return tuple(overrides)
