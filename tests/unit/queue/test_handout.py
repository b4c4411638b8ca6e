"""A batch is encoded and put away once, beside the event loop, however many ranks ask for it."""

import asyncio
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import trajectory

from streamppo.errors import JournalError
from streamppo.queue.shards.batch_refs import BatchRefs, encode_slowly
from streamppo.types import Batch, decode, encode


class Store:
    """Stands in for the object store: its objects, and the threads that put them."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.threads: set[int] = set()

    def put(self, encoded: np.ndarray) -> Any:
        self.threads.add(threading.get_ident())
        self.held.append(encoded.tobytes())
        return len(self.held) - 1


def batch(version: int) -> Batch:
    return Batch(version=version, min_version=0, trajectories=(trajectory([5, 6]),))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300, 70_000])
def test_a_batch_that_is_encoded_piece_by_piece_is_encoded_as_a_whole(count: int) -> None:
    several = msgspec.structs.replace(batch(3), trajectories=(trajectory([5, 6]),) * count)
    assert encode_slowly(several).tobytes() == encode(several)


def test_all_ranks_get_one_reference_and_the_event_loop_encodes_nothing() -> None:
    async def main() -> None:
        store, gate, reads = Store(), threading.Event(), list[int]()

        def read() -> Batch:
            assert gate.wait(20)
            reads.append(threading.get_ident())
            return batch(3)

        handout = BatchRefs(store.put)
        ranks = [asyncio.create_task(handout.ref(3, "whole", read)) for _ in range(8)]
        await asyncio.sleep(0)
        ranks.pop().cancel()
        gate.set()
        assert set(await asyncio.gather(*ranks)) == {0}
        assert await handout.ref(3, "whole", read) == 0, "a rank that comes late"
        assert len(reads) == len(store.held) == 1
        assert threading.get_ident() not in {*reads, *store.threads}
        assert decode(store.held[0], Batch) == batch(3)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_two_batches_are_kept_and_an_older_one_is_made_again() -> None:
    async def main() -> None:
        store = Store()
        handout = BatchRefs(store.put)
        made = [
            await handout.ref(version, "whole", lambda version=version: batch(version)) for version in (0, 1, 0, 2, 1)
        ]
        assert made == [0, 1, 0, 2, 1]
        assert await handout.ref(0, "whole", lambda: batch(0)) == 3
        assert len(handout._refs._tasks) == 2

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_batch_that_could_not_be_read_is_read_again_by_the_next_call() -> None:
    def damaged() -> Batch:
        raise JournalError("damaged")

    async def main() -> None:
        handout = BatchRefs(Store().put)
        asked = await asyncio.gather(*(handout.ref(0, "whole", damaged) for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in asked] == ["damaged"] * 3
        assert await handout.ref(0, "whole", lambda: batch(0)) == 0
        with pytest.raises(JournalError):
            await handout.ref(1, "whole", damaged)

    asyncio.run(asyncio.wait_for(main(), 30))
