"""Writes report.html: a run's metrics, journal, archive and configuration, as far as they exist, on one page.

The report names each part that cannot be read, and shows the others.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import tokenizers

from streamppo import durable
from streamppo.config import file as configfile
from streamppo.config.sections import Config, model_path
from streamppo.errors import JournalError, RunError
from streamppo.queue import attempts as queue_attempts
from streamppo.queue import pairs, report
from streamppo.queue.pairs import PairedDifference
from streamppo.queue.rules.state import settings_of
from streamppo.queue.store import archive, snapshot
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.telemetry import diagnosis, metrics_file
from streamppo.telemetry.attempts import AttemptTable
from streamppo.telemetry.record import read_summary
from streamppo.telemetry.report import page
from streamppo.telemetry.report.view import NamedNumber, RunsTable, TextPiece, TrainedSample, View, attempt
from streamppo.types import Batch, Ints, QueueReport, Trajectory, flags, ints

REPORT = "report.html"
SAMPLES = 4
"""Trajectories shown of each of the three sampled batches."""
SHOWN_TOKENS = 1000
"""Tokens shown of one completion."""
REASONS = 20
"""Failure reasons shown."""
TOKENIZER = "tokenizer.json"
Decode: TypeAlias = Callable[[Ints], str]
T = TypeVar("T")
log = logging.getLogger(__name__)


def write_after(folder: Path) -> None:
    """Write the report of a run that has ended. A failure is a warning; the run's outcome stays."""
    path, why = attempt(lambda: write([folder], folder / REPORT))
    if path is None:
        log.warning("%s: not written: %s", folder / REPORT, why)
    else:
        log.info("report: %s", path)


def write(
    found: Sequence[Path],
    to: Path,
    told: "Sequence[RunDifference]" = (),
    predicted: Sequence[tuple[str, RunsTable]] = (),
) -> Path:
    """Write the report of some runs, by their folders, and of replays, by their files, to `to`.

    It shows the `differences`, and what was `predicted` of each run. Raises `RunError`.
    """
    views = [replay(path) if path.is_file() else _run(path) for path in found]
    text = page.render(views, [_difference_table(one) for one in told], predicted).encode(errors="replace")
    if to in [folder / REPORT for folder in found]:
        # A link there may be another's, in a run that came from elsewhere: it is replaced.
        with durable.naming(to, RunError):
            durable.write(to, text)
    else:
        durable.write_output(to, text, RunError)
    return to


def attempts(folder: Path, config: Config) -> AttemptTable | None:
    """The outcome of every attempt of a run; None, with a log line, if journal or archive cannot be read."""
    found, why = attempt(lambda: queue_attempts.table(folder, config, metrics_file.read(folder)))
    if found is None:
        log.info("attempts are not counted: %s", why)
    return found


class RunDifference(NamedTuple):
    """Two runs, by their names, that are equal up to `version`, and their differences after it (queue/pairs.py)."""

    one: str
    other: str
    version: int
    rows: Sequence[PairedDifference]

    def sentence(self) -> str:
        """The whole difference with its uncertainty, two standard errors."""
        whole = self.rows[0] if self.rows else None
        begin = f"{self.other} less {self.one} since version {self.version}"
        if whole is None or whole.difference is None or whole.error is None:
            return f"{begin}: no two prompts that both trained on"
        told = f"reward {whole.difference:+.4f} ± {2 * whole.error:.4f}"
        apart = f", ± {2 * whole.unpaired:.4f} unpaired" if whole.unpaired is not None else ""
        return f"{begin}: {told} (2 standard errors, {whole.pairs:,} prompts in pairs{apart})"


def differences(found: Sequence[Path]) -> list[RunDifference]:
    """The first run, compared with each other run that shares its beginning. Raises `StreamppoError` for damage."""
    runs = [path for path in found if path.is_dir()]
    rows: list[RunDifference] = []
    for other in runs[1:]:
        configs = tuple(configfile.load(path / configfile.CONFIG) for path in (runs[0], other))
        version = pairs.common_version(runs[0], other, (configs[0], configs[1]))
        if version is not None:
            rows.append(RunDifference(runs[0].name, other.name, version, pairs.differences(runs[0], other, version)))
    return rows


def _difference_table(difference: RunDifference) -> tuple[str, RunsTable]:
    names = ("prompts", difference.one, difference.other, "difference", "± 2 errors", "± unpaired")
    rows = [
        (
            f"updates {row.first} to {row.last}",
            (
                f"{row.pairs:,}",
                *(_number(value) for value in (row.before, row.after, row.difference)),
                *(_number(None if value is None else 2 * value) for value in (row.error, row.unpaired)),
            ),
        )
        for row in difference.rows
    ]
    return difference.sentence(), RunsTable(names, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def replay(path: Path) -> View:
    """The view of a file written by `streamppo replay --set`. Raises `RunError` for any other file."""
    try:
        content = json.loads(durable.read(path))
        lines = [
            msgspec.convert(
                {"update": update["version"], "wall_s": 0.0, **ZEROS, **update["replayed"]}, metrics_file.UpdateLine
            )
            | update["replayed"]
            for update in content["updates"]
        ]
        name = f"{path.parent.parent.name} replay {path.stem}: {' '.join(content['set'])}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: no file of `streamppo replay`: {error}") from error
    return View(name, lines, is_replay=True)


ZEROS = {"wait_s": 0.0, "update_s": 0.0, "push_ms": 0.0, "push_mib": 0.0, "lag_histogram": {}}
"""The entries of an update's line that a replay does not measure."""


def _run(folder: Path) -> View:
    view = View(folder.name, [])
    config = try_part(view, lambda: configfile.load(folder / configfile.CONFIG))
    if config is not None:
        view.config = configfile.show(config)
        # Read before the lines, because a running run writes an update's line after its transaction.
        counters = try_part(view, lambda: read_counters(config, folder, view.notes))
        view.queue, view.failures = counters or (None, ())
    if content := try_part(view, lambda: metrics_file.content(folder)):
        view.lines = content.lines
        view.notes += content.damage
    view.summary = try_part(view, lambda: read_summary(folder))
    if config is not None:
        view.findings = try_part(view, lambda: diagnosis.diagnose_lines(config, view.lines, view.summary)) or ()
        view.samples = try_part(view, lambda: _samples(config, folder)) or []
        view.attempts = try_part(view, lambda: queue_attempts.table(folder, config, view.lines))
    return view


def try_part(view: View, part: Callable[[], T]) -> T | None:
    """Return one part of the report; on failure add the reason to `view.notes` and return None."""
    result, why = attempt(part)
    view.notes += [why] if why and why not in view.notes else []
    return result


def read_counters(config: Config, folder: Path, notes: list[str]) -> tuple[QueueReport | None, Sequence[NamedNumber]]:
    """The queue's counters and failure reasons of one journal transaction; `notes` gets a line for each missing one."""
    with closing(Journal.open_run(folder)) as journal:
        parts = attempt(lambda: _counters(config, journal)), attempt(lambda: _failures(journal))
    notes += [why for _, why in parts if why]
    return parts[0][0], parts[1][0] or ()


def _counters(config: Config, journal: Journal) -> QueueReport | None:
    saved = journal.read()
    return None if saved is None else report.report(snapshot.rebuild(settings_of(config), saved, journal.path))


def _failures(journal: Journal) -> list[NamedNumber]:
    """The reasons of failed attempts, the most frequent first."""
    reasons = Counter((ended.state.replace("_", " "), _first_line(ended.reason)) for ended in journal.ended_attempts())
    rows = [NamedNumber(state, f"{count:,}", reason) for (state, reason), count in reasons.most_common(REASONS)]
    if (more := len(reasons) - REASONS) > 0:
        rows.append(NamedNumber(f"and {more} other reasons", "", "`streamppo inspect --dead-letters` and `--prompt`"))
    if (counters := journal.counters()) and (skipped := counters.counts.get("skipped_prompts", 0)):
        rows.append(NamedNumber("skipped prompts", f"{skipped:,}", "algorithm.curriculum: not sampled"))
    return rows


def _first_line(reason: str) -> str:
    return (reason.strip().splitlines() or [""])[0][:200]


def _samples(config: Config, folder: Path) -> list[TrainedSample]:
    """Samples of three archived batches: the oldest, the middle one and the newest."""
    archived = archive.open(folder)
    if not (versions := archived.versions()):
        raise JournalError(f"{folder}: no batch is kept in its archive")
    decode = decoder(Path(model_path(config, folder)))
    chosen = dict.fromkeys((versions[0], versions[len(versions) // 2], versions[-1]))
    return [sample for version in chosen for sample in _batch_samples(archived.batch(version), decode)]


def decoder(model: Path) -> Decode:
    """A function from tokens to text without special tokens; avoids transformers, whose import takes 4 s of CPU."""
    if not (model / TOKENIZER).is_file():
        return Tokenizer(model).decode
    tokenizer = read_tokenizer(model)
    return lambda tokens: tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


def read_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """The tokenizer in the file of `model`, without transformers. Raises `RunError`."""
    file = model / TOKENIZER
    found, why = attempt(lambda: tokenizers.Tokenizer.from_buffer(durable.read(file)))
    if found is None:
        raise RunError(f"{file}: cannot be read: {why}")
    return found


def _batch_samples(batch: Batch, decode: Decode) -> Iterable[TrainedSample]:
    step = max(1, len(batch.trajectories) // SAMPLES)
    for trajectory in batch.trajectories[::step][:SAMPLES]:
        identity = trajectory.identity
        cut = f", the first {SHOWN_TOKENS} shown" if trajectory.num_tokens > SHOWN_TOKENS else ""
        title = (
            f"prompt {identity.prompt} sample {identity.sample}: "
            f"{trajectory.num_tokens} tokens, {trajectory.finish}{cut}"
        )
        prompt = decode(ints(trajectory.prompt_tokens))
        yield TrainedSample(batch.version + 1, title, trajectory.reward, prompt, _pieces(batch, trajectory, decode))


def _pieces(batch: Batch, one: Trajectory, decode: Decode) -> list[TextPiece]:
    """The completion, split where the version changes and between the policy's and other tokens."""
    tokens, mask = ints(one.tokens)[:SHOWN_TOKENS], flags(one.mask).tolist()
    lags = [batch.version - version for version in ints(one.versions).tolist()]
    pieces: list[TextPiece] = []
    places = range(len(tokens))
    for lag, same in groupby(places, lambda place: lags[place] if mask[place] else None):
        pieces.append(TextPiece(decode(tokens[list(same)]), lag))
    return pieces
