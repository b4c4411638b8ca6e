"""An SGLang's actor has the served version and the next one in its memory, and no other copy of them."""

import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, cast

import pytest
import torch
from fake_sglang import Fake, opened, pushed, run
from torch import Tensor
from transformers import Qwen3MoeConfig

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import engine, push
from streamppo.rollout.sglang.copies import VersionCopies
from streamppo.rollout.sglang.push import BySharedMemory
from streamppo.rollout.weight_checks import Architecture
from streamppo.weights import shared_memory
from streamppo.weights.content import hash_tensor

MIXTURE = Qwen3MoeConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    moe_intermediate_size=4,
    num_experts=4,
    num_experts_per_tok=2,
)


class Place(NamedTuple):
    """SGLang's FlattenedTensorMetadata."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    end: int
    size: int


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The one class of SGLang that describes a bucket."""
    module: Any = ModuleType("sglang.srt.weight_sync.tensor_bucket")
    module.FlattenedTensorMetadata = Place
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.weight_sync.tensor_bucket", module)
    yield


def tensors(number: int) -> dict[str, Tensor]:
    torch.manual_seed(number)
    return {"a": torch.randn(3, 7), "b": torch.randn(5).bfloat16(), "c": torch.randn(900), "d": torch.tensor(2.0)}


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where the memory of these tensors begins."""
    return list(dict.fromkeys(tensor.untyped_storage().data_ptr() for tensor in tensors))


def test_two_sets_of_memory_alternate_and_the_served_version_stays() -> None:
    made, found = VersionCopies(3000, shared=False), list[list[int]]()
    served = made.copy(tensors(0))
    made.serve()
    for number in range(1, 5):
        copied = made.copy(tensors(number))
        assert all(served[name].equal(one) for name, one in tensors(number - 1).items())
        assert all(copied[name].equal(one) for name, one in tensors(number).items())
        found.append(addresses(copied.values()))
        made.serve()
        served = copied
    assert found[0] == found[2] and found[1] == found[3] and not {*found[0]} & {*found[1]}


def test_a_version_that_was_not_served_leaves_the_served_one_and_its_memory_to_the_next() -> None:
    made = VersionCopies(3000, shared=False)
    served = made.copy(tensors(0))
    made.serve()
    refused = made.copy(tensors(1))
    later = made.copy(tensors(2))
    assert addresses(refused.values()) == addresses(later.values()) != addresses(served.values())
    assert all(served[name].equal(one) for name, one in tensors(0).items())


def test_a_copy_that_is_not_as_pushed_is_an_error_by_name() -> None:
    contents = {name: hash_tensor(one) for name, one in tensors(0).items()}
    VersionCopies(3000, shared=False).copy(tensors(0), contents)
    with pytest.raises(WeightsError, match="c differs from what was pushed"):
        VersionCopies(3000, shared=False).copy(tensors(0) | {"c": tensors(1)["c"]}, contents)


@pytest.mark.usefixtures("sglang")
def test_sglang_reads_a_version_where_it_was_copied_once() -> None:
    carrier = BySharedMemory(cast("Any", None), 3000, server=False)
    made = VersionCopies(3000, shared=True).copy(tensors(0))
    asyncio.run(carrier.stage(made))
    assert addresses(flat for flat, _ in carrier._staged) == addresses(made.values())
    found = {
        place.name: flat[place.start : place.end].view(place.dtype).view(place.shape)
        for flat, places in carrier._staged
        for place in cast("list[Place]", places)
    }
    assert found.keys() == tensors(0).keys() and all(found[name].equal(one) for name, one in tensors(0).items())


@pytest.mark.usefixtures("sglang")
def test_experts_of_a_mixture_are_read_there_too_under_the_names_of_files() -> None:
    architecture = Architecture(MIXTURE)
    whole = {name: torch.randn(shape).bfloat16() for name, shape in architecture.shapes.items()}
    made = VersionCopies(1 << 20, shared=True).copy(whole)
    carrier, saved = BySharedMemory(cast("Any", None), 1 << 20, server=False), architecture.as_saved(made)
    asyncio.run(carrier.stage(saved))
    assert sum(".experts." in name for name in saved) == 2 * 4 * 3
    shared = set(addresses(made.values()))
    # Newer versions of transformers copy what they split.
    has_copies = not shared.issuperset(addresses(saved.values()))
    assert len(carrier._staged) == len(shared) + has_copies


def test_a_part_has_tensors_of_one_type_and_not_more_bytes_than_a_bucket() -> None:
    types = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float32, "d": torch.bfloat16, "e": torch.bfloat16}
    every = {name: torch.zeros(3 if name == "a" else 4, dtype=dtype) for name, dtype in types.items()}
    parts = [([name for name, _ in part], last) for part, last in push._parts(every, 14)]
    assert parts == [(["a", "b"], False), (["c"], False), (["d"], False), (["e"], True)]


def test_a_cancelled_swap_that_still_copies_changes_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, order = threading.Event(), threading.Event(), list[str]()
    copy = engine._copy_as_files

    def slowly(architecture: Any, copies: Any, tensors: Any, contents: Any = None) -> Any:
        order.append("begins")
        begun.set()
        may_go_on.wait(10)
        order.append("ends")
        return copy(architecture, copies, tensors, contents)

    async def case() -> None:
        fake = Fake()
        running = await opened(fake)
        monkeypatch.setattr(engine, "_copy_as_files", slowly)
        cancelled = asyncio.create_task(running.update_weights(6, pushed(2.0)))
        await asyncio.to_thread(begun.wait, 10)
        cancelled.cancel()
        following = asyncio.create_task(running.update_weights(7, pushed(3.0)))
        await asyncio.wait([following], timeout=0.2)
        may_go_on.set()
        await asyncio.wait_for(following, 10)
        assert (running.version, fake.norm) == (7, 3.0)
        assert order == ["begins", "ends"] * 2
        await running.stop()

    asyncio.run(case())


def test_a_full_shared_memory_is_told_before_a_write_to_it_would_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2000}))
    with pytest.raises(WeightsError, match=r"/dev/shm has 0.0 GiB left, and a version takes"):
        VersionCopies(3000, shared=True).copy(tensors(0))


def test_an_engine_dies_and_starts_again_with_the_served_version_while_the_next_is_copied() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        await engine.update_weights(6, pushed(2.0))
        fake.swallows = True
        with pytest.raises(WeightsError):
            await engine.update_weights(7, pushed(3.0))
        fake.swallows = False
        await engine._until_serving()
        assert (fake.loaded, fake.norm) == (6, 2.0), "not the version that it did not take"
        await engine.update_weights(8, pushed(4.0))
        assert (fake.loaded, fake.norm) == (8, 4.0)
        await engine.stop()

    run(case())
