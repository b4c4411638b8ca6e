"""Finds a completion in a run's archive. A completion's segments are trajectories, which may be in several batches."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamppo.errors import ConfigError, JournalError
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.rollout.continuation import RecordedCompletion
from streamppo.types import Floats, Identity, Ints, Trajectory, flags, ints


class ArchivedCompletion(NamedTuple):
    """A completion with the versions that sampled its tokens, and the critic's values (NaN if they were not kept).

    `update` is the version that the last segment's batch made. `reward` is None if the completion's end is missing.
    """

    identity: Identity
    update: int
    recorded: RecordedCompletion
    versions: Ints
    values: Floats
    reward: float | None

    def refuse(self, at: int) -> None:
        """Raise `ConfigError` if token `at` is beyond the end or was not sampled by the policy."""
        count, turns = len(self.recorded.tokens), self.recorded.turns
        if at >= count:
            raise ConfigError(f"--at {at}: the completion has {count} tokens, 0 to {count - 1}")
        if not self.recorded.mask[at]:
            nearest = min((start for start, _ in turns), key=lambda start: abs(start - at))
            raise ConfigError(f"--at {at}: that token was not sampled; the nearest turn begins at token {nearest}")

    def sampled_by(self, version: int) -> bool:
        """True if the completion is complete and was sampled only by `version`."""
        sampled = self.versions[self.recorded.mask]
        return self.reward is not None and bool((sampled == version).all())


class _Part(NamedTuple):
    trajectory: Trajectory
    update: int
    values: Floats


def find(run: Path, prompt: int, sample: int | None, attempt: int | None) -> ArchivedCompletion | None:
    """Return a completion of a prompt, by default the newest attempt at the first sample; None if there is none.

    Raises `JournalError` if a segment of the completion was not kept or not trained on.
    """
    parts = [
        part
        for part in _parts(run, prompt)
        if sample in (None, part.trajectory.identity.sample) and attempt in (None, part.trajectory.identity.attempt)
    ]
    if not parts:
        return None
    first = min(parts, key=lambda part: (part.trajectory.identity.sample, -part.trajectory.identity.attempt))
    return _joined(run, [part for part in parts if _name(part) == _name(first)])


def _parts(run: Path, prompt: int) -> list[_Part]:
    """Return the trajectories of a prompt. Opens only files whose range of prompts includes `prompt`."""
    with closing(Journal.open_run(run)) as journal:
        versions = journal.versions().values()
    archive, parts = Archive(run / "archive", checksums(versions)), list[_Part]()
    for version in versions:
        if version.archived is None or not version.archived.first_prompt <= prompt <= version.archived.last_prompt:
            continue
        batch, record = archive.batch_and_record(version.version - 1)
        for row, trajectory in enumerate(batch.trajectories):
            if trajectory.identity.prompt == prompt:
                unknown = np.full(trajectory.num_tokens, np.nan, np.float32)
                values = record["values"][row] if "values" in record else unknown
                parts.append(_Part(trajectory, version.version, values))
    return parts


def _name(part: _Part) -> tuple[int, int]:
    return part.trajectory.identity.sample, part.trajectory.identity.attempt


def _joined(run: Path, parts: list[_Part]) -> ArchivedCompletion:
    parts = sorted(parts, key=lambda part: part.trajectory.identity.segment)
    rows = [part.trajectory for part in parts]
    if missing := sorted(set(range(rows[-1].identity.segment + 1)) - {row.identity.segment for row in rows}):
        identity = rows[0].identity
        raise JournalError(
            f"{run}: segment {missing[0]} of prompt {identity.prompt}, sample {identity.sample} was not kept, or not "
            "trained on: the completion's beginning is missing"
        )
    tokens, mask = ints(b"".join(row.tokens for row in rows)), flags(b"".join(row.mask for row in rows))
    recorded = RecordedCompletion(ints(rows[0].prompt_tokens), tokens, mask)
    return ArchivedCompletion(
        rows[0].identity,
        parts[-1].update,
        recorded,
        ints(b"".join(row.versions for row in rows)),
        np.concatenate([part.values for part in parts]),
        None if rows[-1].finish == "cut" else rows[-1].reward,
    )
