"""Reads the outcome of every attempt of a run from its journal and archive (telemetry/attempts.py)."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from streamppo.config.sections import Config
from streamppo.queue.rules.records import EndedAttempt
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import attempts
from streamppo.telemetry.attempts import Attempt, AttemptTable, End
from streamppo.telemetry.metrics_file import Line
from streamppo.types import Batch, turns

MOST_BATCHES = 200
"""At most this many batches are read, evenly spaced over the run."""


def table(run: Path, config: Config, lines: Iterable[Line]) -> AttemptTable:
    """Count the attempts of the run in the folder `run`; its metrics `lines` give the times. Raises `JournalError`."""
    with closing(Journal.open_run(run)) as journal:
        ended, published = journal.ended_attempts(), journal.versions()
    archive = Archive(run / "archive", checksums(published.values()))
    versions = archive.versions()
    chosen = versions[:: -(-len(versions) // MOST_BATCHES) or 1]
    clock = _Clock(lines)
    all_attempts = [_ended(attempt, clock) for attempt in ended]
    for version in chosen:
        all_attempts += _trained(archive.batch(version), clock)
    return attempts.table(
        all_attempts,
        len(versions),
        len(chosen),
        compared=config.algorithm.compares_samples is not None,
        whole_completions=config.queue.segments is None,
    )


class _Clock:
    """Finds the hour of the run at which a version began, from the lines of updates."""

    def __init__(self, lines: Iterable[Line]) -> None:
        known = sorted((line["update"], line["wall_s"]) for line in lines if "update" in line)
        self._versions: Sequence[int] = [version for version, _ in known]
        self._hours: Sequence[int] = [int(wall_s // 3600) for _, wall_s in known]

    def hour(self, version: int) -> int | None:
        place = bisect_right(self._versions, version) - 1
        return self._hours[max(place, 0)] if self._hours else None


def _ended(attempt: EndedAttempt, clock: _Clock) -> Attempt:
    end: End = "failed" if attempt.stage else "lost" if attempt.state == "lost" else "dropped"
    # An abandoned slot's reason is "sample 2 failed 3 times: " and the reason of its last failure, which is counted.
    reason = (
        attempt.reason.partition(" times: ")[2] if attempt.state == "abandoned" and attempt.stage else attempt.reason
    )
    return Attempt(
        end=end,
        prompt=attempt.identity.prompt,
        version=attempt.version,
        tokens=attempt.tokens,
        reason=attempts.first_line(reason) if end == "failed" else attempt.state.replace("_", " "),
        lag=None if attempt.oldest < 0 else attempt.version - attempt.oldest,
        source=attempt.source,
        hour=clock.hour(attempt.version),
    )


def _trained(batch: Batch, clock: _Clock) -> Iterator[Attempt]:
    hour = clock.hour(batch.version)
    for trajectory in batch.trajectories:
        # A completion in segments is counted once, by its last segment; all other segments end with "cut".
        if trajectory.finish != "cut":
            oldest = trajectory.oldest_version
            yield Attempt(
                end="trained",
                prompt=trajectory.identity.prompt,
                version=batch.version,
                tokens=trajectory.num_sampled,
                lag=batch.version - oldest,
                source=trajectory.source,
                hour=hour,
                reward=trajectory.reward,
                masked=oldest < batch.min_version,
                undelivered=bool(turns.undelivered(trajectory.turns)),
            )
