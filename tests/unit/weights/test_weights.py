"""Buckets, checksums and the ledger: a version arrives bit for bit as it was pushed, or nobody loads it."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.errors import WeightsError
from streamppo.types import Push, checksum, decode, encode
from streamppo.weights import buckets, transport
from streamppo.weights.buckets import ALIGNMENT
from streamppo.weights.ledger import Ledger

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3), min_size=1, max_size=6)


def tensors_of(shapes: list[list[int]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{n}": torch.randn(shape, generator=generator).to(dtype) for n, shape in enumerate(shapes)}


def push(version: int, shift: float = 0.0) -> tuple[Push, list[Any]]:
    return buckets.flatten(version, version - 1 if version else None, {"w": torch.arange(9.0) + shift}, 1 << 20)


# --- buckets -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.integers(1, 300))
def test_what_goes_into_buckets_comes_out_bit_for_bit(shapes: list[list[int]], dtype: torch.dtype, size: int) -> None:
    sent = tensors_of(shapes, dtype)
    described, arrays = buckets.flatten(3, 2, sent, size)
    again = decode(encode(described), Push)
    for array in arrays:
        array.flags.writeable = False
    arrived = buckets.unflatten(again, arrays)
    assert list(arrived) == list(sent)
    assert all(torch.equal(sent[name], arrived[name]) and sent[name].dtype == arrived[name].dtype for name in sent)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 300))
def test_tensors_are_aligned_and_only_a_larger_one_exceeds_its_bucket(shapes: list[list[int]], size: int) -> None:
    described, arrays = buckets.flatten(0, None, tensors_of(shapes), size)
    assert [array.nbytes for array in arrays] == list(described.bucket_bytes)
    for number, array in enumerate(arrays):
        inside = [place for place in described.tensors if place.bucket == number]
        assert all(place.start % ALIGNMENT == 0 for place in inside)
        assert array.nbytes <= size or inside[0].nbytes > size
    ends = {(place.bucket, place.start + place.nbytes) for place in described.tensors}
    assert {bucket for bucket, _ in ends} == set(range(len(arrays)))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found_and_its_bucket_named(data: st.DataObject) -> None:
    described, arrays = buckets.flatten(7, 6, tensors_of([[5, 5], [40], [3]]), 128)
    number = data.draw(st.integers(0, len(arrays) - 1))
    at = data.draw(st.integers(0, arrays[number].size - 1))
    arrays[number][at] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    with pytest.raises(WeightsError, match=f"push 7: bucket {number} does not match"):
        buckets.unflatten(described, arrays)


def test_what_arrives_read_only_is_neither_copied_nor_lost_with_its_array() -> None:
    sent = tensors_of([[50], [3, 7]])
    described, arrays = buckets.flatten(7, 6, sent, 1 << 20)
    for array in arrays:
        array.flags.writeable = False
    arrived = buckets.unflatten(described, arrays)
    assert arrived["t0"].data_ptr() == arrays[0].ctypes.data
    kept = [weakref.ref(array) for array in arrays]
    del arrays, array
    gc.collect()
    assert all(one() is not None for one in kept), "the tensors keep the memory alive that they are views of"
    assert all(torch.equal(sent[name], arrived[name]) for name in sent)
    del arrived
    gc.collect()
    assert all(one() is None for one in kept)


def test_a_missing_a_foreign_and_a_swapped_bucket_are_found() -> None:
    described, arrays = buckets.flatten(7, 6, tensors_of([[50], [50]]), 200)
    for wrong in (arrays[:1], [*arrays, arrays[0]], arrays[::-1]):
        with pytest.raises(WeightsError, match="push 7"):
            buckets.unflatten(described, wrong)


def test_the_digest_is_of_names_shapes_types_and_bytes_and_of_nothing_else() -> None:
    one = torch.arange(6.0)

    def digest(version: int, tensors: dict[str, torch.Tensor]) -> str:
        return buckets.flatten(version, None, tensors, 1 << 20)[0].digest

    assert digest(1, {"a": one}) == digest(2, {"a": one.clone()})
    others = [{"b": one}, {"a": one.reshape(2, 3)}, {"a": one.view(torch.int32)}, {"a": one + 1}]
    assert len({digest(1, tensors) for tensors in [{"a": one}, *others]}) == 5


# --- the ledger ----------------------------------------------------------------------------------------------


def test_the_ledger_hands_out_the_newest_version_and_keeps_a_fixed_number() -> None:
    ledger = Ledger[str]()
    assert ledger.newest is None
    assert ledger.after(-1) is None
    for version in range(5, 9):
        ledger.publish(push(version)[0], f"handle {version}")
    assert (ledger.newest, len(ledger._entries)) == (8, 2)
    found = ledger.after(5)
    assert found is not None and found.handle == "handle 8"
    assert ledger.after(8) is None


def test_publishing_twice_brings_the_bytes_from_elsewhere_and_a_gap_or_other_bytes_are_refused() -> None:
    ledger = Ledger[str]()
    ledger.publish(push(3)[0], "first")
    ledger.publish(push(3)[0], "again")
    found = ledger.after(2)
    assert found is not None and found.handle == "again"
    for wrong in (push(3, shift=1.0)[0], push(5)[0], push(2)[0]):
        with pytest.raises(WeightsError, match=f"version {wrong.version} was published after version 3"):
            ledger.publish(wrong, "wrong")


# --- the pusher ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the object store: what was put, in order."""
    put: list[Any] = []
    monkeypatch.setattr(transport.ray, "put", lambda array: put.append(array.copy()) or len(put) - 1)
    return put


def start(pusher: transport.Pusher, version: int, values: torch.Tensor) -> float:
    """Write `values` as `version` into the pusher's buckets, and push them."""
    filled = pusher.buckets({"w": values})
    filled.tensors["w"].copy_(values)
    return pusher.push(version, filled)


def test_pushes_overlap_what_follows_and_arrive_whole_and_in_order(store: list[Any]) -> None:
    gate, published = threading.Event(), list[tuple[Push, list[Any]]]()

    def publish(described: bytes, refs: list[Any], values: bytes) -> None:
        assert gate.wait(10)
        published.append((decode(described, Push), [store[ref] for ref in refs]))

    pusher = transport.Pusher(publish, 1 << 20)
    assert start(pusher, 0, torch.zeros(3)) == 0.0
    assert published == []
    gate.set()
    assert start(pusher, 1, torch.ones(3)) > 0.0
    pusher.last.result()
    assert [(described.version, described.base_version) for described, _ in published] == [(0, None), (1, 0)]
    _, arrived = transport.unpack(encode(published[1][0]), published[1][1])
    assert torch.equal(arrived["w"], torch.ones(3))
    assert pusher.last.result().digest == published[1][0].digest


def test_a_version_is_written_while_the_one_before_is_read_and_two_sets_of_buckets_take_turns(store: list[Any]) -> None:
    gate, published = threading.Semaphore(0), list[Push]()

    def publish(described: bytes, refs: list[Any], values: bytes) -> None:
        assert gate.acquire(timeout=10)
        published.append(decode(described, Push))

    pusher = transport.Pusher(publish, 1 << 20)
    used: list[buckets.Buckets] = []
    for version in range(5):
        filled = pusher.buckets({"w": torch.zeros(3)})
        assert not used or filled is not used[-1], "the push before still reads it"
        filled.tensors["w"].fill_(version)
        gate.release()
        pusher.push(version, filled)
        used.append(filled)
    pusher.last.result()
    assert len({id(one) for one in used}) == transport.SETS
    sent = [torch.from_numpy(array.view(np.float32))[0].item() for array in store]
    assert sent == [0, 1, 2, 3, 4]
    assert len({one.digest for one in published}) == 5


def test_gaps_between_tensors_change_no_checksum_however_often_buckets_are_used() -> None:
    first = {"a": torch.ones(3), "b": torch.ones(5)}
    again = buckets.Buckets(first, 1 << 20)
    for fill in (7.0, 1.0):
        for tensor in again.tensors.values():
            tensor.fill_(fill)
    assert again.push(0, None).digest == buckets.flatten(0, None, first, 1 << 20)[0].digest


def test_a_checksum_is_the_blake3_hash_of_the_bytes() -> None:
    assert checksum(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    described, (array,) = buckets.flatten(0, None, {"w": torch.arange(3.0)}, 1 << 20)
    assert described.checksums == (checksum(array.tobytes()),)


def test_a_ledger_that_has_forgotten_gets_the_last_version_once_more(store: list[Any]) -> None:
    published: list[int] = []
    pusher = transport.Pusher(lambda described, *_: published.append(decode(described, Push).version), 1 << 20)
    pusher.again()
    for version in (0, 1):
        start(pusher, version, torch.zeros(3))
    pusher.last.result()
    pusher.again()
    start(pusher, 2, torch.zeros(3))
    pusher.last.result()
    assert published == [0, 1, 1, 2]
    assert len(store) == 3


@pytest.mark.usefixtures("store")
def test_the_lag_that_is_admitted_travels_with_its_version_and_is_no_part_of_the_weights() -> None:
    published: list[Push] = []
    pusher = transport.Pusher(lambda described, *_: published.append(decode(described, Push)), 1 << 20)
    for version, lag in enumerate((3, None)):
        filled = pusher.buckets({"w": torch.zeros(3)})
        filled.tensors["w"].zero_()
        pusher.push(version, filled, admitted_lag=lag)
    pusher.last.result()
    assert [push.admitted_lag for push in published] == [3, None]
    assert published[0].digest == published[1].digest


@pytest.mark.usefixtures("store")
def test_a_push_that_failed_is_told_to_the_next_one() -> None:
    def publish(described: bytes, refs: list[Any], values: bytes) -> None:
        raise WeightsError("the ledger refused")

    pusher = transport.Pusher(publish, 1 << 20)
    start(pusher, 0, torch.zeros(3))
    with pytest.raises(WeightsError, match="the ledger refused"):
        start(pusher, 1, torch.zeros(3))
