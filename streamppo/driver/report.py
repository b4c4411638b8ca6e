"""Writes report.html, a page with a run's metrics, journal, archive and configuration; names unreadable parts."""

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
from streamppo.queue.rules.state import queue_settings
from streamppo.queue.store import archive, snapshot
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.telemetry import diagnosis, metrics_file
from streamppo.telemetry.attempts import AttemptTable, first_line
from streamppo.telemetry.record import read_summary
from streamppo.telemetry.report import page
from streamppo.telemetry.report.view import NamedNumber, RunsTable, TextPiece, TrainedSample, View, make_part, or_dash
from streamppo.types import Batch, Ints, QueueReport, Trajectory, flags, ints

REPORT = "report.html"
SAMPLES = 4
"""The number of trajectories shown from each of the three batches of `_samples`."""
SHOWN_TOKENS = 1000
REASONS = 20
ZEROS = {"wait_s": 0.0, "update_s": 0.0, "push_ms": 0.0, "push_mib": 0.0, "lag_histogram": {}}
TOKENIZER = "tokenizer.json"
Decode: TypeAlias = Callable[[Ints], str]
T = TypeVar("T")
log = logging.getLogger(__name__)


def write_after(folder: Path) -> None:
    """Write the report of a run that has ended. A failure is only a warning and does not change the run's outcome."""
    path, why = make_part(lambda: write([folder], folder / REPORT))
    if path is None:
        log.warning("%s: not written: %s", folder / REPORT, why)
    else:
        log.info("report: %s", path)


def write(
    paths: Sequence[Path],
    target: Path,
    differences: "Sequence[RunDifference]" = (),
    predicted: Sequence[tuple[str, RunsTable]] = (),
) -> Path:
    """Write a report about `paths`, folders of runs and files of replays, to `target`. Raises `RunError`."""
    views = [replay_view(path) if path.is_file() else _run_view(path) for path in paths]
    tables = [_difference_table(difference) for difference in differences]
    text = page.render(views, tables, predicted).encode(errors="replace")
    if target in [folder / REPORT for folder in paths]:
        # A run from another machine may have a link of this name, which is replaced.
        with durable.naming(target, RunError):
            durable.write(target, text)
    else:
        durable.write_output(target, text, RunError)
    return target


def count_attempts(folder: Path, config: Config) -> AttemptTable | None:
    """Return the attempts of a run by outcome; None if nothing was sampled yet, or if a file cannot be read."""
    lines = metrics_file.read(folder)
    if all("part" in line or "end" in line for line in lines) and not (folder / "journal.sqlite").exists():
        return None
    table, why = make_part(lambda: queue_attempts.table(folder, config, lines))
    if table is None:
        log.info("attempts are not counted: %s", why)
    return table


class RunDifference(NamedTuple):
    """The names of two runs with equal versions up to `version`, and their later differences (queue/pairs.py)."""

    first: str
    second: str
    version: int
    rows: Sequence[PairedDifference]

    def sentence(self) -> str:
        total = self.rows[0] if self.rows else None
        begin = f"{self.second} minus {self.first} since version {self.version}"
        if total is None or total.difference is None or total.error is None:
            return f"{begin}: fewer than two prompts that both trained on"
        reward = f"reward {total.difference:+.4f} ± {2 * total.error:.4f}"
        unpaired = f", ± {2 * total.unpaired:.4f} unpaired" if total.unpaired is not None else ""
        return f"{begin}: {reward} (2 standard errors, {total.pairs:,} prompts in pairs{unpaired})"


def differences(paths: Sequence[Path]) -> list[RunDifference]:
    """Compare the first run with each run that shares its beginning. Raises `StreamppoError` for damaged files."""
    runs = [path for path in paths if path.is_dir()]
    rows: list[RunDifference] = []
    for other in runs[1:]:
        configs = tuple(configfile.load(path / configfile.CONFIG) for path in (runs[0], other))
        version = pairs.common_version(runs[0], other, (configs[0], configs[1]))
        if version is not None:
            rows.append(RunDifference(runs[0].name, other.name, version, pairs.differences(runs[0], other, version)))
    return rows


def _difference_table(difference: RunDifference) -> tuple[str, RunsTable]:
    names = ("prompts", difference.first, difference.second, "difference", "± 2 errors", "± unpaired")
    rows = [
        (
            f"updates {row.first} to {row.last}",
            (
                f"{row.pairs:,}",
                *(or_dash(value, "{:.4f}") for value in (row.before, row.after, row.difference)),
                *(or_dash(None if value is None else 2 * value, "{:.4f}") for value in (row.error, row.unpaired)),
            ),
        )
        for row in difference.rows
    ]
    return difference.sentence(), RunsTable(names, rows)


def replay_view(path: Path) -> View:
    """Return the view of a file that `streamppo replay --set` wrote. Raises `RunError` for any other file."""
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
        raise RunError(f"{path}: not a file of `streamppo replay`: {error}") from error
    return View(name, lines, is_replay=True)


def _run_view(folder: Path) -> View:
    view = View(folder.name, [])
    config = try_part(view, lambda: configfile.load(folder / configfile.CONFIG))
    if config is not None:
        view.config = configfile.show(config)
        # A driver commits an update to the journal before it writes the update's line, so the journal is read first.
        counters = try_part(view, lambda: read_counters(config, folder, view.notes))
        view.queue, view.failures = counters or (None, ())
    if content := try_part(view, lambda: metrics_file.content(folder)):
        view.lines = content.lines
        view.notes += content.damage
    view.summary = try_part(view, lambda: read_summary(folder))
    if config is not None:
        view.findings = try_part(view, lambda: diagnosis.diagnose_lines(config, view.lines, view.summary)) or ()
        view.samples = try_part(view, lambda: _samples(config, folder)) or []
        # Of a run that has ended, the summary has them: counting them again would read many batches.
        counted = view.summary and view.summary.get("attempts")
        view.attempts = counted or try_part(view, lambda: queue_attempts.table(folder, config, view.lines))
    return view


def try_part(view: View, part: Callable[[], T]) -> T | None:
    """Return the result of `part`. If `part` raises an error, add the reason to `view.notes` and return None."""
    result, why = make_part(part)
    view.notes += [why] if why and why not in view.notes else []
    return result


def read_counters(config: Config, folder: Path, notes: list[str]) -> tuple[QueueReport | None, Sequence[NamedNumber]]:
    """Read the queue's counters and failure reasons from the journal. If a part cannot be read, `notes` get a line."""
    with closing(Journal.open_run(folder)) as journal:
        counters, no_counters = make_part(lambda: _counters(config, journal))
        failures, no_failures = make_part(lambda: _failures(journal))
    notes += [why for why in (no_counters, no_failures) if why]
    return counters, failures or ()


def _counters(config: Config, journal: Journal) -> QueueReport | None:
    saved = journal.read()
    return None if saved is None else report.report(snapshot.rebuild_state(queue_settings(config), saved, journal.path))


def _failures(journal: Journal) -> list[NamedNumber]:
    reasons = Counter((ended.state.replace("_", " "), first_line(ended.reason)) for ended in journal.ended_attempts())
    rows = [NamedNumber(state, f"{count:,}", reason) for (state, reason), count in reasons.most_common(REASONS)]
    if (more := len(reasons) - REASONS) > 0:
        rows.append(NamedNumber(f"and {more} other reasons", "", "`streamppo inspect --dead-letters` and `--prompt`"))
    if (counters := journal.counters()) and (skipped := counters.counts.get("skipped_prompts", 0)):
        rows.append(NamedNumber("skipped prompts", f"{skipped:,}", "algorithm.curriculum: not sampled"))
    return rows


def _samples(config: Config, folder: Path) -> list[TrainedSample]:
    archived = archive.open(folder)
    if not (versions := archived.versions()):
        raise JournalError(f"{folder}: no batch is kept in its archive")
    decode = decoder(Path(model_path(config, folder)))
    chosen = dict.fromkeys((versions[0], versions[len(versions) // 2], versions[-1]))
    return [sample for version in chosen for sample in _batch_samples(archived.batch(version), decode)]


def decoder(model: Path) -> Decode:
    """Return a function from tokens to text, if possible without transformers, whose import takes 4 s of CPU."""
    if not (model / TOKENIZER).is_file():
        return Tokenizer(model).decode
    tokenizer = read_tokenizer(model)
    return lambda tokens: tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


def read_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in the file of `model`, read without transformers. Raises `RunError`."""
    file = model / TOKENIZER
    tokenizer, why = make_part(lambda: tokenizers.Tokenizer.from_buffer(durable.read(file)))
    if tokenizer is None:
        raise RunError(f"{file}: cannot be read: {why}")
    return tokenizer


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


def _pieces(batch: Batch, trajectory: Trajectory, decode: Decode) -> list[TextPiece]:
    tokens, mask = ints(trajectory.tokens)[:SHOWN_TOKENS], flags(trajectory.mask).tolist()
    lags = [batch.version - version for version in ints(trajectory.versions).tolist()]
    pieces: list[TextPiece] = []
    places = range(len(tokens))
    for lag, run_of_places in groupby(places, lambda place: lags[place] if mask[place] else None):
        pieces.append(TextPiece(decode(tokens[list(run_of_places)]), lag))
    return pieces
