"""A batch in parts: an outline, which every rank needs in full, and the token ids of the rows that a rank reads.

    batch = join(make_outline(batch), select_tokens(batch, rows))       equal, except that other rows have zero tokens

Every rank computes advantages, corrections and metrics from all rows, without token ids. Only forward and backward
passes need token ids, and only one rank runs them for a row.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from streamppo.errors import JournalError
from streamppo.types import Batch, Outline, Tokens, Trajectory, ints


def make_outline(batch: Batch) -> Outline:
    """Make the outline of a batch: all of it except its token ids."""
    lengths = [len(trajectory.prompt_tokens) // 4 for trajectory in batch.trajectories]
    none = Tokens(row=0, prompt_tokens=b"", tokens=b"", candidates=b"")
    bare = tuple(_with_tokens(trajectory, none) for trajectory in batch.trajectories)
    prompt_lengths = np.array(lengths, dtype="<i4").tobytes()
    return Outline(batch=structs.replace(batch, trajectories=bare), prompt_lengths=prompt_lengths)


def select_tokens(batch: Batch, rows: Sequence[int]) -> tuple[Tokens, ...]:
    """Select the token ids of the trajectories at `rows`; `batch` may be a part, and lack some of them."""
    place = {row: at for at, row in enumerate(ints(batch.rows).tolist())} if batch.rows else None
    return tuple(
        _tokens(row, batch.trajectories[row if place is None else place[row]])
        for row in rows
        if place is None or row in place
    )


def merge(batches: Sequence[Batch]) -> Batch:
    """Join a whole batch from its parts, or from a single part. Raises `JournalError` if a row is missing."""
    first, *others = batches
    if not others and not first.rows:
        return first
    rows = dict(pair for part in batches for pair in zip(ints(part.rows).tolist(), part.trajectories, strict=True))
    if sorted(rows) != list(range(len(rows))):
        raise JournalError(f"the batch of version {first.version} came in parts, and lacks rows")
    return structs.replace(first, rows=b"", trajectories=tuple(rows[row] for row in sorted(rows)))


def merge_outlines(outlines: Sequence[Outline]) -> Outline:
    """Join the outline of a whole batch from the outlines of its parts. Raises as `merge` does."""
    first, *others = outlines
    if not others and not first.batch.rows:
        return first
    order = np.argsort(ints(b"".join(outline.batch.rows for outline in outlines)))
    lengths = ints(b"".join(outline.prompt_lengths for outline in outlines))
    return Outline(batch=merge([outline.batch for outline in outlines]), prompt_lengths=lengths[order].tobytes())


def widths(outline: Outline) -> list[int]:
    """The number of prompt and completion tokens in every row."""
    completions = (len(trajectory.versions) // 4 for trajectory in outline.batch.trajectories)
    return [prompt + tokens for prompt, tokens in zip(ints(outline.prompt_lengths).tolist(), completions, strict=True)]


def join(outline: Outline, tokens: Sequence[Tokens]) -> Batch:
    """Make the batch with these `tokens`; other rows get zeros of the same length, and no candidates or routes."""
    by_row = {row_tokens.row: row_tokens for row_tokens in tokens}
    lengths = ints(outline.prompt_lengths).tolist()
    bare = enumerate(zip(outline.batch.trajectories, lengths, strict=True))
    trajectories = tuple(
        _with_tokens(trajectory, by_row.get(row) or _zeros(trajectory, length)) for row, (trajectory, length) in bare
    )
    return structs.replace(outline.batch, trajectories=trajectories)


def _tokens(row: int, trajectory: Trajectory) -> Tokens:
    columns = {name: getattr(trajectory, name) for name in Tokens.__struct_fields__ if name != "row"}
    return Tokens(row=row, **columns)


def _with_tokens(trajectory: Trajectory, tokens: Tokens) -> Trajectory:
    columns = {name: column for name, column in structs.asdict(tokens).items() if name != "row"}
    return structs.replace(trajectory, **columns)


def _zeros(trajectory: Trajectory, prompt_length: int) -> Tokens:
    tokens = bytes(len(trajectory.versions))
    return Tokens(row=0, prompt_tokens=bytes(4 * prompt_length), tokens=tokens, candidates=b"")
