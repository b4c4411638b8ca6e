"""A batch in parts: its outline, which every rank needs of all rows, and the tokens of the rows that a rank reads.

    batch = join(outline_of(batch), rows, tokens_of(batch, rows))       exactly, but for the tokens of other rows: zeros

Advantages, corrections and metrics are computed on every rank from all rows, and need no token ids. Only a pass over
rows does, and each row is passed over by one rank.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from streamppo.types import Batch, Outline, Tokens, Trajectory, ints


def outline_of(batch: Batch) -> Outline:
    """Everything of a batch but its token ids."""
    lengths = [len(one.prompt_tokens) // 4 for one in batch.trajectories]
    none = Tokens(prompt_tokens=b"", tokens=b"", candidates=b"")
    bare = tuple(_with(one, none) for one in batch.trajectories)
    prompt_lengths = np.array(lengths, dtype="<i4").tobytes()
    return Outline(batch=structs.replace(batch, trajectories=bare), prompt_lengths=prompt_lengths)


def tokens_of(batch: Batch, rows: Sequence[int]) -> tuple[Tokens, ...]:
    """The token ids of the trajectories at `rows`."""
    picked = (batch.trajectories[row] for row in rows)
    return tuple(
        Tokens(prompt_tokens=one.prompt_tokens, tokens=one.tokens, candidates=one.candidates, routes=one.routes)
        for one in picked
    )


def widths(outline: Outline) -> list[int]:
    """The prompt and completion tokens of every row."""
    completions = (len(one.versions) // 4 for one in outline.batch.trajectories)
    return [prompt + tokens for prompt, tokens in zip(ints(outline.prompt_lengths).tolist(), completions, strict=True)]


def join(outline: Outline, rows: Sequence[int], tokens: Sequence[Tokens]) -> Batch:
    """The batch with the `tokens` of `rows`; those of other rows are zeros, as many, without candidates and routes."""
    known = dict(zip(rows, tokens, strict=True))
    lengths = ints(outline.prompt_lengths).tolist()
    bare = enumerate(zip(outline.batch.trajectories, lengths, strict=True))
    whole = tuple(_with(one, known.get(row) or _zeros(one, length)) for row, (one, length) in bare)
    return structs.replace(outline.batch, trajectories=whole)


def _with(one: Trajectory, tokens: Tokens) -> Trajectory:
    return structs.replace(one, **structs.asdict(tokens))


def _zeros(one: Trajectory, prompt_length: int) -> Tokens:
    return Tokens(prompt_tokens=bytes(4 * prompt_length), tokens=bytes(len(one.versions)), candidates=b"")
