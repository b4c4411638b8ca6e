"""A rank of several fetches the outline of a batch and the tokens of its rows: fewer bytes, and the same rows."""

import asyncio

import msgspec
import numpy as np
import pytest
from conftest import trajectory
from test_handout import Store

from streamppo.queue.shards.batch_refs import BatchRefs, encode_slowly
from streamppo.queue.store import batch_parts
from streamppo.types import Batch, Outline, Tokens, decode, encode

RANKS = 8


def batch(rows: int = 64, prompt: int = 400, completion: int = 1000) -> Batch:
    many = [trajectory([7] * completion) for _ in range(rows)]
    tokens = [np.full(prompt, row, np.int32).tobytes() for row in range(rows)]
    made = (msgspec.structs.replace(one, prompt_tokens=given) for one, given in zip(many, tokens, strict=True))
    return Batch(version=3, min_version=0, trajectories=tuple(made))


@pytest.mark.parametrize("rows", [0, 1, 16, 70_000])
def test_parts_that_are_encoded_piece_by_piece_are_encoded_as_a_whole(rows: int) -> None:
    whole = msgspec.structs.replace(batch(1, 3, 2), trajectories=batch(1, 3, 2).trajectories * rows)
    outline, tokens = batch_parts.make_outline(whole), batch_parts.select_tokens(whole, range(rows))
    assert encode_slowly(outline).tobytes() == encode(outline)
    assert encode_slowly(tokens).tobytes() == encode(tokens)


def test_the_parts_of_all_rows_are_the_batch_and_other_rows_are_zeros_of_their_length() -> None:
    whole = batch(4, 3, 2)
    whole = msgspec.structs.replace(
        whole, trajectories=tuple(msgspec.structs.replace(one, routes=bytes(16)) for one in whole.trajectories)
    )
    outline = batch_parts.make_outline(whole)
    assert batch_parts.widths(outline) == [5] * 4
    assert batch_parts.join(outline, batch_parts.select_tokens(whole, [2, 0, 3, 1])) == whole
    some = batch_parts.join(outline, batch_parts.select_tokens(whole, [2]))
    assert some.trajectories[2] == whole.trajectories[2]
    other, had = some.trajectories[1], whole.trajectories[1]
    assert (other.prompt_tokens, other.tokens, other.candidates, other.routes) == (bytes(12), bytes(8), b"", b"")
    assert not any(one.routes for one in outline.batch.trajectories), "no rank needs those of another's rows"
    assert (other.logprobs, other.versions, other.reward) == (had.logprobs, had.versions, had.reward)


def test_each_rank_fetches_the_outline_and_its_own_rows_and_the_batch_is_read_once() -> None:
    whole, reads = batch(), list[int]()

    def read() -> Batch:
        reads.append(1)
        return whole

    async def main() -> None:
        store = Store()
        handout = BatchRefs(store.put)
        rows = [np.arange(rank, 64, RANKS, dtype=np.int32) for rank in range(RANKS)]
        outlines = [await handout.ref(3, "outline", read) for _ in rows]
        tokens = [await handout.ref(3, mine.tobytes(), read) for mine in rows]
        assert set(map(str, outlines)) == {"0"} and len(set(map(str, tokens))) == RANKS
        assert len(reads) == 1
        outline = decode(store.held[0], Outline)
        for mine, held in zip(rows, store.held[1:], strict=True):
            found = batch_parts.join(outline, decode(held, tuple[Tokens, ...]))
            assert all(found.trajectories[row] == whole.trajectories[row] for row in mine)
        # Of a row of 400 + 1000 tokens: 13 bytes for each of the completion and 4 for each of the prompt; in parts 9
        # for each of the completion, and 4 for each of both in one row of eight.
        before, fetched = len(encode(whole)), len(store.held[0]) + max(map(len, store.held[1:]))
        assert before == pytest.approx(64 * 14_600, rel=0.03)
        assert fetched == pytest.approx(64 * (9_000 + 5_600 / RANKS), rel=0.05)

    asyncio.run(asyncio.wait_for(main(), 30))
