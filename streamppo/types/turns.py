"""Turns: the tokens of a row that belong to each turn of an agent. Pure: it imports only numpy.

A turn samples the tokens `start` to `end` - 1 of a row (types/branches.py) one after another. `reused` is the number of
tokens of the turn's context that came from the engine's cache. `delivered` is 0 if the agent did not receive the turn.
The tokens of such a turn are context for later turns, and are not trained on.

    row      0  1  2  3  4  5  6  7       prompt 0 and 1, turn (2, 4, 0, 1), message 4 and 5, turn (6, 8, 3, 1)
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from streamppo.types.wire import Flags, ints

FIELDS = 4


class TurnPlace(NamedTuple):
    """One turn: its tokens in the row, the number of `reused` tokens, and whether it was `delivered` (0 or 1)."""

    start: int
    end: int
    reused: int
    delivered: int


def column(turns: Iterable[TurnPlace]) -> bytes:
    """Return the bytes column of turns, which are in the order of the row."""
    return np.array([*turns], dtype="<i4").tobytes()


def read(column: bytes) -> list[TurnPlace]:
    """Return the turns of a column."""
    return [TurnPlace(*fields) for fields in ints(column).reshape(-1, FIELDS).tolist()]


def undelivered(column: bytes) -> int:
    """Return the number of sampled tokens in turns that the agent did not receive."""
    return sum(turn.end - turn.start for turn in read(column) if not turn.delivered) if column else 0


def flaw(column: bytes, prompt: int, mask: Flags) -> str | None:
    """Return why a column is not a list of turns for `prompt` tokens and a completion's `mask`; None if it is."""
    if len(column) % (4 * FIELDS):
        return f"turns of {len(column)} bytes, which are not {FIELDS} int32 each"
    starts, ends, reused, delivered = ints(column).reshape(-1, FIELDS).T.astype(np.int64)
    before = np.concatenate([[prompt], ends[:-1]])
    if (out := (starts < before) | (ends <= starts) | (ends > prompt + len(mask))).any():
        at = int(np.argmax(out))
        return (
            f"a turn of tokens {starts[at]} to {ends[at] - 1}, where the row has {before[at]} to "
            f"{prompt + len(mask) - 1} left for it"
        )
    if (out := (reused < 0) | (reused > starts)).any():
        at = int(np.argmax(out))
        return f"a turn that begins at token {starts[at]} reused {reused[at]} tokens"
    if (out := (delivered < 0) | (delivered > 1)).any():
        return f"a turn has delivered = {delivered[np.argmax(out)]}, which is neither 0 nor 1"
    in_turn = np.zeros(len(mask), np.bool_)
    for start, end in zip(starts[delivered == 1] - prompt, ends[delivered == 1] - prompt, strict=True):
        in_turn[start:end] = True
    if (differs := in_turn != mask).any():
        return f"the mask and the turns disagree on whether token {prompt + int(np.argmax(differs))} is sampled"
    return None
