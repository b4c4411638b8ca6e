"""From buckets to a replica, over the ledger: a version arrives bit for bit, or not at all."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from push_case import Rank, Tensors, joined

from streamppo.errors import WeightsError
from streamppo.types import Push, decode, encode
from streamppo.weights import buckets, object_store
from streamppo.weights.buckets import ALIGNMENT, Buckets, PackedPush, Shard
from streamppo.weights.content import check
from streamppo.weights.ledger import Ledger, PublishReply
from streamppo.weights.pusher import SETS, PushedVersion, Pusher
from streamppo.weights.replica import Replica
from streamppo.weights.shares import EncodedRecord, RankShare, ShareCollector, join

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


def tensors_of(shapes: list[list[int]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{n}": torch.randn(shape, generator=generator).to(dtype) for n, shape in enumerate(shapes)}


def equal(one: Tensors, other: Tensors) -> bool:
    bits = [
        (a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in zip(one.values(), other.values(), strict=True)
    ]
    return list(one) == list(other) and all(torch.equal(a, b) for a, b in bits)


# --- buckets and replicas ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(SHAPES, DTYPES, st.integers(1, 300), st.integers(1, 5))
def test_what_ranks_put_into_buckets_comes_out_bit_for_bit(
    shapes: list[list[int]], dtype: torch.dtype, size: int, ranks: int
) -> None:
    sent = tensors_of(shapes, dtype)
    push, arrays = joined([Rank(sent, rank, ranks, size).push(3, sent) for rank in range(ranks)])
    replica = Replica()
    replica.take(decode(encode(push), Push), arrays)
    assert equal(replica.tensors, sent) and replica.version == 3
    assert all(replica.tensors[name].dtype == tensor.dtype for name, tensor in sent.items())
    check(replica.contents, sent.items())


@settings(max_examples=60, deadline=None)
@given(SHAPES, DTYPES, st.integers(1, 4), st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 99))
def test_a_chain_of_deltas_of_any_density_makes_every_version(
    shapes: list[list[int]], dtype: torch.dtype, ranks: int, densities: list[float], seed: int
) -> None:
    present = tensors_of(shapes, dtype)
    many = [Rank(present, rank, ranks) for rank in range(ranks)]
    replica = Replica()
    replica.take(*joined([one.push(0, present) for one in many]))
    generator = torch.Generator().manual_seed(seed)
    for version, density in enumerate(densities, 1):
        for name, tensor in present.items():
            moved = torch.rand(tensor.shape, generator=generator) < density
            present[name] = torch.where(moved, -tensor, tensor)
        replica.take(*joined([one.push(version, present, delta=True) for one in many]))
        assert equal(replica.tensors, present) and replica.version == version
        check(replica.contents, replica.tensors.items())


def test_a_delta_has_the_bytes_of_what_changed_and_a_shard_that_changed_whole_goes_as_it_is() -> None:
    present = {"still": torch.zeros(10_000), "few": torch.ones(10_000), "all": torch.ones(100)}
    rank = Rank(present, bucket_bytes=1 << 20)
    first = rank.push(0, present)
    present["few"][::1000] = 2.0
    present["all"] = torch.randn(100)
    second = rank.push(1, present, delta=True)
    assert [piece.is_delta for piece in second.push.pieces] == [True, True, False]
    assert (second.push.base_version, first.push.base_version) == (0, None)
    assert sum(second.push.bucket_bytes) < 1000 < sum(first.push.bucket_bytes) / 50
    same = rank.push(2, present, delta=True)
    assert sum(same.push.bucket_bytes) < 300 and same.push.digest == second.push.digest


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 300))
def test_shards_are_aligned_and_only_a_larger_one_exceeds_its_bucket(shapes: list[list[int]], size: int) -> None:
    push, arrays = buckets.pack_whole(0, tensors_of(shapes), size)
    assert [array.nbytes for array in arrays] == list(push.bucket_bytes)
    for number, array in enumerate(arrays):
        inside = [piece for piece in push.pieces if piece.bucket == number]
        assert all(piece.start % ALIGNMENT == 0 for piece in inside)
        assert array.nbytes <= size or inside[0].nbytes > size
    ends = {(piece.bucket, piece.start + piece.stored) for piece in push.pieces}
    assert {bucket for bucket, _ in ends} == set(range(len(arrays)))


def test_what_arrives_whole_is_neither_copied_nor_lost_with_its_array() -> None:
    sent = tensors_of([[50], [3, 7]])
    push, arrays = Rank(sent, bucket_bytes=1 << 20).push(7, sent)
    replica = Replica()
    replica.take(push, arrays)
    assert replica.tensors["t0"].data_ptr() == arrays[0].ctypes.data
    kept = [weakref.ref(array) for array in arrays]
    del arrays
    gc.collect()
    assert all(one() is not None for one in kept), "the tensors keep the memory alive that they are views of"
    assert equal(replica.tensors, sent)
    del replica
    gc.collect()
    assert all(one() is None for one in kept)


def test_memory_of_a_replicas_own_is_used_again_and_a_delta_never_writes_to_the_object_store() -> None:
    present = tensors_of([[400], [30, 7]])
    rank = Rank(present)
    whole = rank.push(0, present)
    before = [array.copy() for array in whole.arrays]
    replica = Replica()
    replica.take(*whole)
    present["t0"][5] = 9.0
    replica.take(*rank.push(1, present, delta=True))
    own = replica.tensors["t0"].data_ptr()
    assert all(np.array_equal(one, other) for one, other in zip(whole.arrays, before, strict=True))
    present["t0"][6] = 9.0
    replica.take(*rank.push(2, present, delta=True))
    assert equal(replica.tensors, present) and replica.tensors["t0"].data_ptr() == own


# --- what must not become a version --------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found_by_the_contents(data: st.DataObject) -> None:
    sent = tensors_of([[5, 5], [40], [3]])
    push, arrays = buckets.pack_whole(7, sent, 128)
    piece = data.draw(st.sampled_from(push.pieces))
    at = data.draw(st.integers(piece.start, piece.start + piece.stored - 1))
    arrays[piece.bucket][at] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    replica = Replica()
    replica.take(push, arrays)
    with pytest.raises(WeightsError, match=f"{push.tensors[piece.tensor].name} differs from what was pushed"):
        check(replica.contents, replica.tensors.items())


def test_a_missing_a_foreign_and_swapped_buckets_are_found() -> None:
    sent = tensors_of([[50], [50]])
    push, arrays = buckets.pack_whole(7, sent, 200)
    replica = Replica()
    for wrong in (arrays[:1], [*arrays, arrays[0]], [arrays[0], arrays[1][:-4]]):
        with pytest.raises(WeightsError, match="version 7: the buckets that arrived are not"):
            replica.take(push, wrong)
        assert replica.version == -1
    replica.take(push, arrays[::-1])
    with pytest.raises(WeightsError, match=r"t0 differs from what was pushed \(2 tensors"):
        check(replica.contents, replica.tensors.items())


def test_a_delta_to_another_version_a_replayed_one_and_a_damaged_one_leave_no_version() -> None:
    present = tensors_of([[3000]], torch.bfloat16)
    rank = Rank(present)
    chain = [rank.push(0, present)]
    for version in (1, 2):
        present["t0"][version::50] *= -1
        chain.append(rank.push(version, present, delta=True))
    for wrong in ([0, 2], [0, 1, 1], [1]):
        replica = Replica()
        with pytest.raises(WeightsError, match=r"is a delta to version \d, not to"):
            for number in wrong:
                replica.take(*chain[number])
        assert replica.version == -1
    replica = Replica()
    replica.take(*chain[0])
    damaged = chain[1].arrays[0].copy()
    damaged[0] = 3
    with pytest.raises(WeightsError, match="a delta has no valid head"):
        replica.take(chain[1].push, [damaged])
    assert replica.version == -1
    replica.take(*chain[0])
    replica.forget()
    with pytest.raises(WeightsError, match="not to -1"):
        replica.take(*chain[1])


def test_pieces_outside_of_their_bucket_or_of_other_sizes_are_refused() -> None:
    push, arrays = buckets.pack_whole(1, tensors_of([[50], [50]]), 1 << 20)
    first, second = push.pieces
    replace = msgspec.structs.replace
    for wrong, words in (
        (replace(first, start=arrays[0].nbytes), "lies outside of its bucket"),
        (replace(first, bucket=1), "lies outside of its bucket"),
        (replace(first, nbytes=196), "contain it twice|196 of 200 bytes of 't0' arrived"),
        (replace(first, first=4), "leave out a byte"),
        (replace(first, tensor=1), "leave out a byte"),
    ):
        with pytest.raises(WeightsError, match=words):
            Replica().take(replace(push, pieces=(wrong, second)), arrays)
    with pytest.raises(WeightsError, match="leave out a byte, or contain it twice"):
        Replica().take(replace(push, pieces=(first, second, second)), arrays)
    with pytest.raises(WeightsError, match="0 of 200 bytes of 't1' arrived"):
        Replica().take(replace(push, pieces=(first,)), arrays)


def test_the_digest_is_of_names_shapes_types_and_bytes_and_of_nothing_else() -> None:
    one = torch.arange(6.0)

    def digest(version: int, tensors: Tensors, bucket_bytes: int = 1 << 20) -> str:
        return buckets.pack_whole(version, tensors, bucket_bytes).push.digest

    assert digest(1, {"a": one}) == digest(2, {"a": one.clone()}, bucket_bytes=1)
    others = [{"b": one}, {"a": one.reshape(2, 3)}, {"a": one.view(torch.int32)}, {"a": one + 1}]
    assert len({digest(1, tensors) for tensors in [{"a": one}, *others]}) == 5


@settings(max_examples=30, deadline=None)
@given(SHAPES, DTYPES, st.integers(2, 6))
def test_the_digest_does_not_depend_on_how_many_ranks_there_are(
    shapes: list[list[int]], dtype: torch.dtype, ranks: int
) -> None:
    sent = tensors_of(shapes, dtype)
    alone = buckets.pack_whole(1, sent, 1 << 20).push
    assert joined([Rank(sent, rank, ranks).push(1, sent) for rank in range(ranks)]).push.digest == alone.digest


# --- shares of ranks -----------------------------------------------------------------------------------------


def shares(version: int = 1, ranks: int = 3) -> list[Push]:
    sent = tensors_of([[6, 2], [7]])
    return [Rank(sent, rank, ranks).push(version, sent).push for rank in range(ranks)]


def test_a_version_is_published_with_its_last_share_in_any_order_and_the_last_of_two_by_one_rank_counts() -> None:
    async def story() -> None:
        async def publish(whole: RankShare[str]) -> tuple[list[str], EncodedRecord]:
            return whole.refs, whole.record

        collector = ShareCollector(publish)
        first, second, third = shares()
        early = [
            RankShare(third, ["old"], b""),
            RankShare(first, ["first"], b"numbers"),
            RankShare(third, ["third"], b""),
        ]
        waiting = [asyncio.create_task(collector.result(share)) for share in early]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        published = await collector.result(RankShare(second, ["second"], b""))
        assert published == (["first", "second", "third"], b"numbers")
        assert await asyncio.gather(*waiting) == [published] * 3

    asyncio.run(story())


def test_shares_that_are_not_of_one_version_are_refused() -> None:
    replace = msgspec.structs.replace
    first, second, third = shares()
    other = replace(third, tensors=third.tensors[::-1])
    with pytest.raises(WeightsError, match="the ranks do not publish the same tensors"):
        join([first, second, other])
    with pytest.raises(WeightsError, match=r"shares of ranks \[0, 1\]"):
        join([first, second])
    with pytest.raises(WeightsError, match=r"the ranks' deltas are to versions \['0', '5'\]"):
        join([replace(first, base_version=0), replace(second, base_version=5), third])
    with pytest.raises(WeightsError, match="leave out a byte, or contain it twice"):
        join([first, replace(first, rank=1), third])
    with pytest.raises(WeightsError, match=r"leave out a byte|bytes of"):
        join([first, replace(second, pieces=()), third])
    with pytest.raises(WeightsError, match="do not publish the same"):
        join([first, second, replace(third, version=2)])


def test_ranks_wait_for_one_publication_and_a_repeated_call_gets_its_result() -> None:
    async def story() -> None:
        made: list[int] = []

        async def publish(whole: RankShare[str]) -> int:
            assert (whole.refs, whole.record) == (["first", "second"], b"numbers")
            assert (whole.push.rank, whole.push.ranks) == (0, 1)
            made.append(whole.push.version)
            await asyncio.sleep(0)
            return len(made)

        joining = ShareCollector(publish)
        first, second = shares(ranks=2)
        waiting = asyncio.create_task(joining.result(RankShare(first, ["first"], b"numbers")))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert await joining.result(RankShare(second, ["second"], b"")) == 1 == await waiting
        assert await joining.result(RankShare(first, [], b"")) == 1, "Ray has made the call once more"
        assert made == [1]

    asyncio.run(story())


def test_an_error_of_a_publication_reaches_every_rank_and_the_version_can_be_tried_again() -> None:
    async def story() -> None:
        broken = [True]

        async def publish(whole: RankShare[str]) -> str:
            if broken.pop():
                raise WeightsError("no")
            return "published"

        joining = ShareCollector(publish)
        both = [RankShare(share, list[str](), b"") for share in shares(ranks=2)]
        for error in await asyncio.gather(*map(joining.result, both), return_exceptions=True):
            assert isinstance(error, WeightsError)
        broken.append(False)
        assert await asyncio.gather(*map(joining.result, both)) == ["published"] * 2

    asyncio.run(story())


# --- the ledger ----------------------------------------------------------------------------------------------


def entry(version: int, base: int | None = None, size: int = 100, digest: int = 0) -> Push:
    tensors = buckets.pack_whole(version, {"w": torch.full((4,), float(digest))}, 1 << 20).push.tensors
    return Push(version=version, base_version=base, tensors=tensors, pieces=(), bucket_bytes=(size,))


def versions(ledger: Ledger[str], after: int) -> list[int]:
    return [one.push.version for one in ledger.versions_after(after)]


def test_an_engine_takes_the_deltas_it_lacks_or_the_whole_version_before_them() -> None:
    ledger = Ledger[str]()
    assert ledger.newest is None and ledger.versions_after(-1) == []
    ledger.publish(entry(5), "5")
    for version in (6, 7, 8):
        ledger.publish(entry(version, version - 1, size=10), f"{version}")
    assert ledger.newest == 8
    assert versions(ledger, 7) == [8] and versions(ledger, 5) == [6, 7, 8] and versions(ledger, 8) == []
    assert versions(ledger, 4) == versions(ledger, -1) == [5, 6, 7, 8]
    assert [one.handle for one in ledger.versions_after(6)] == ["7", "8"]
    ledger.publish(entry(9), "9")
    assert versions(ledger, -1) == versions(ledger, 8) == [9], "older versions than a whole one are dropped"


def test_versions_that_come_in_another_order_count_from_where_there_is_no_gap() -> None:
    ledger = Ledger[str]()
    ledger.publish(entry(7, 6), "7")
    assert ledger.newest is None
    ledger.publish(entry(5), "5")
    assert ledger.newest == 5
    ledger.publish(entry(6, 5), "6")
    assert ledger.newest == 7 and versions(ledger, 5) == [6, 7]


def test_a_version_again_brings_its_bytes_from_elsewhere_and_other_weights_are_refused() -> None:
    ledger = Ledger[str]()
    ledger.publish(entry(3), "first")
    ledger.publish(entry(3), "again")
    assert [one.handle for one in ledger.versions_after(2)] == ["again"]
    with pytest.raises(WeightsError, match="version 3 was published again with other weights"):
        ledger.publish(entry(3, digest=1), "wrong")


def test_deltas_end_when_they_have_as_many_bytes_as_the_whole_version() -> None:
    ledger = Ledger[str]()
    ledger.publish(entry(0, size=100), "")
    answers = [ledger.reply_to("digest")]
    for version in (1, 2, 3):
        ledger.publish(entry(version, version - 1, size=40), "")
        answers.append(ledger.reply_to("digest"))
    assert [one.wants_whole for one in answers] == [False, False, False, True]
    assert {one.whole for one in answers} == {0} and answers[0].digest == "digest"
    ledger.publish(entry(4), "")
    assert (ledger.reply_to("").whole, ledger.reply_to("").wants_whole) == (4, False)


# --- the pusher ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the object store: its objects, in order."""
    put: list[Any] = []
    monkeypatch.setattr(object_store.ray, "put", lambda array: put.append(array.copy()) or len(put) - 1)
    return put


def pusher_to(look: Callable[[Push, list[Any]], object], ledger: Ledger[list[Any]] | None = None) -> Pusher:
    """A pusher whose versions `look` sees, and a ledger answers for."""
    kept = Ledger[list[Any]]() if ledger is None else ledger

    def publish(described: bytes, refs: list[Any], learned: bytes) -> PublishReply:
        push = decode(described, Push)
        look(push, refs)
        kept.publish(push, refs)
        return kept.reply_to(push.digest)

    return Pusher(publish, object_store.ObjectStoreSender(), 1 << 20, deltas=True)


def start(pusher: Pusher, version: int, values: torch.Tensor) -> PushedVersion:
    """Write `values` as `version` into the pusher's buckets, and push them."""
    filled = pusher.buckets({"w": Shard.whole(values)})
    filled.tensors["w"].copy_(values)
    return pusher.push(version, filled)


def test_pushes_overlap_what_follows_and_arrive_whole_and_in_order(store: list[Any]) -> None:
    gate, published = threading.Event(), list[tuple[Push, list[Any]]]()

    def look(push: Push, refs: list[Any]) -> None:
        assert gate.wait(10)
        published.append((push, [store[ref] for ref in refs]))

    pusher = pusher_to(look)
    assert start(pusher, 0, torch.zeros(3)) == PushedVersion("", 0.0, 0)
    assert published == []
    gate.set()
    before = start(pusher, 1, torch.ones(3))
    assert before.ms > 0 and before.nbytes == 12
    pusher.last.result()
    assert [push.version for push, _ in published] == [0, 1]
    replica = Replica()
    replica.take(*published[1])
    assert torch.equal(replica.tensors["w"], torch.ones(3))
    assert pusher.last.result().digest == published[1][0].digest


def test_a_version_is_written_while_the_one_before_is_read_and_two_sets_of_buckets_take_turns(store: list[Any]) -> None:
    gate, published = threading.Semaphore(0), list[Push]()

    def look(push: Push, refs: list[Any]) -> None:
        assert gate.acquire(timeout=10)
        published.append(push)

    pusher = pusher_to(look)
    used: list[Buckets] = []
    for version in range(5):
        filled = pusher.buckets({"w": Shard.whole(torch.zeros(3))})
        assert not used or filled is not used[-1], "the push before still reads it"
        filled.tensors["w"].fill_(version + 1.5)
        gate.release()
        pusher.push(version, filled)
        used.append(filled)
    pusher.last.result()
    assert len({id(one) for one in used}) == SETS
    sent = [torch.from_numpy(array.view(np.float32))[0].item() for array in store]
    assert sent == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert len({one.digest for one in published}) == 5


def test_a_version_that_is_still_being_written_is_described_when_it_is_there(store: list[Any]) -> None:
    published, gate = list[Push](), threading.Event()
    pusher, values = pusher_to(lambda push, _: published.append(push)), torch.arange(50.0)
    filled = pusher.buckets({"w": Shard.whole(values)})

    def written() -> None:
        gate.wait()
        filled.tensors["w"].copy_(values)

    pusher.push(0, filled, wait_for_copy=written)
    assert not published
    gate.set()
    pusher.last.result()
    assert published[0].tensors == buckets.pack_whole(0, {"w": values}, 1 << 20).push.tensors


def test_what_changes_little_goes_as_deltas_until_they_are_as_many_bytes_as_a_whole_one(store: list[Any]) -> None:
    published: list[tuple[Push, list[Any]]] = []
    pusher = pusher_to(lambda push, refs: published.append((push, [store[ref] for ref in refs])))
    values = torch.randn(1000)
    replica = Replica()
    for version in range(40):
        values[torch.randperm(1000)[:50]] *= -1
        start(pusher, version, values)
        pusher.last.result()
        replica.take(*published[-1])
        assert torch.equal(replica.tensors["w"], values)
        assert pusher._pushes.keys() == set(
            range(max(n for n in range(version + 1) if published[n][0].base_version is None), version + 1)
        )
    bases = [push.base_version for push, _ in published]
    assert bases[:3] == [None, 0, 1] and 2 <= bases.count(None) <= 8
    whole = [sum(push.bucket_bytes) for push, _ in published if push.base_version is None]
    deltas = [sum(push.bucket_bytes) for push, _ in published if push.base_version is not None]
    assert max(deltas) < min(whole) / 5


def test_the_memory_of_a_version_is_not_written_while_the_next_one_is_compared_with_it(
    store: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, gate = threading.Event(), threading.Event()
    real = Buckets.push

    def slow(self: Buckets, version: int, before: Buckets | None = None, **ranks: int) -> PackedPush:
        if before is not None:
            compared.set()
            assert gate.wait(10)
        return real(self, version, before, **ranks)

    monkeypatch.setattr(Buckets, "push", slow)
    pusher = pusher_to(lambda push, refs: None)
    for version in range(2):
        start(pusher, version, torch.zeros(1000))
    assert compared.wait(10)
    taken = threading.Event()

    def take() -> None:
        pusher.buckets({"w": Shard.whole(torch.zeros(1000))})
        taken.set()

    threading.Thread(target=take).start()
    assert not taken.wait(0.2)
    gate.set()
    assert taken.wait(10)
    pusher.last.result()


def test_gaps_between_tensors_change_no_digest_however_often_buckets_are_used() -> None:
    first = {"a": torch.ones(3), "b": torch.ones(5)}
    again = Buckets({name: Shard.whole(tensor) for name, tensor in first.items()}, 1 << 20)
    for fill in (7.0, 1.0):
        for tensor in again.tensors.values():
            tensor.fill_(fill)
    assert again.push(0).push.digest == buckets.pack_whole(0, first, 1 << 20).push.digest


def test_a_ledger_that_has_forgotten_gets_the_whole_chain_once_more(store: list[Any]) -> None:
    published: list[int] = []
    pusher = pusher_to(lambda push, refs: published.append(push.version))
    assert pusher.republish() == []
    values = torch.zeros(1000)
    for version in (0, 1):
        values[version] = 1.0
        start(pusher, version, values)
    pusher.last.result()
    wait(pusher.republish(), timeout=10)
    assert sorted(published) == [0, 0, 1, 1]
    start(pusher, 2, torch.randn(1000))
    pusher.last.result()
    wait(pusher.republish(), timeout=10)
    assert sorted(published) == [0, 0, 1, 1, 2, 2], "the third version is whole: nothing before it is needed"
    assert len(store) == 3


@pytest.mark.usefixtures("store")
def test_a_share_that_another_rank_sends_no_more_holds_up_no_other_version() -> None:
    gate, published = threading.Event(), list[int]()

    def look(push: Push, refs: list[Any]) -> None:
        if push.version == 0 and published:
            assert gate.wait(20)
        published.append(push.version)

    pusher = pusher_to(look)
    values = torch.zeros(1000)
    for version in (0, 1):
        values[version] = 1.0
        start(pusher, version, values)
    pusher.last.result()
    stuck, free = pusher.republish()
    assert free.result(timeout=10).whole == 0 and not stuck.done()
    gate.set()
    stuck.result(timeout=10)


@pytest.mark.usefixtures("store")
def test_the_lag_that_is_admitted_travels_with_its_version_and_is_no_part_of_the_weights() -> None:
    published: list[Push] = []
    pusher = pusher_to(lambda push, refs: published.append(push))
    for version, lag in enumerate((3, None)):
        filled = pusher.buckets({"w": Shard.whole(torch.zeros(3))})
        filled.tensors["w"].zero_()
        pusher.push(version, filled, admitted_lag=lag)
    pusher.last.result()
    assert [push.admitted_lag for push in published] == [3, None]
    assert published[0].digest == published[1].digest


@pytest.mark.usefixtures("store")
def test_a_push_that_failed_is_told_to_the_next_one() -> None:
    def look(push: Push, refs: list[Any]) -> None:
        raise WeightsError("the ledger refused")

    pusher = pusher_to(look)
    start(pusher, 0, torch.zeros(3))
    with pytest.raises(WeightsError, match="the ledger refused"):
        start(pusher, 1, torch.zeros(3))


def test_pinned_buckets_are_as_large_as_their_content_and_locked_until_they_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's allocator of pinned memory rounds up to a power of two."""
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        locked[address] = nbytes
        return flags - 1

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)

    def check_error(code: int) -> None:
        if code:
            raise OSError(code)

    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    shards = {"a": Shard.whole(torch.zeros(1000)), "b": Shard.whole(torch.zeros(700))}
    made = Buckets(shards, 4096, pinned=True)
    assert sorted(locked.values()) == [2800, 4000]
    made.tensors["a"].fill_(1)
    view = made.tensors["b"]
    del made
    gc.collect()
    assert list(locked.values()) == [2800], "a view keeps its bucket locked"
    del view
    gc.collect()
    assert not locked
    driver.cudaHostRegister = lambda *_: 2
    with pytest.raises(OSError):
        Buckets(shards, 4096, pinned=True)
