"""Three hundred faults between two learner ranks and an engine: each is refused or survived, none is served."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from deaths_case import SETTINGS
from push_case import Rank, Remote, Tensors, joined
from ray.exceptions import ObjectLostError
from transformers import Qwen2ForCausalLM

from streamppo.rollout import puller
from streamppo.rollout.embedded import fused_decoder, parameters
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.weight_sync import WeightSync
from streamppo.types import Push, encode
from streamppo.weights import object_store
from streamppo.weights.adapters import WholeModel
from streamppo.weights.buckets import PackedPush
from streamppo.weights.ledger import Ledger

Chain = list[PackedPush]
Fault = Callable[[random.Random, Chain, Chain], Chain | None]
"""Makes a damaged copy of a chain, beside one of another version; None where it does not apply."""
replace = msgspec.structs.replace


def _damaged(chain: Chain, at: int, push: Push | None = None, arrays: list[np.ndarray] | None = None) -> Chain:
    one = chain[at]
    return [*chain[:at], PackedPush(push or one.push, one.arrays if arrays is None else arrays), *chain[at + 1 :]]


def truncated(dice: random.Random, chain: Chain, other: Chain) -> Chain:
    at = dice.randrange(len(chain))
    arrays = list(chain[at].arrays)
    arrays[-1] = arrays[-1][: -dice.randrange(1, 9)]
    return _damaged(chain, at, arrays=arrays)


def flipped(dice: random.Random, chain: Chain, other: Chain) -> Chain:
    at = len(chain) - 1
    piece = dice.choice([piece for piece in chain[at].push.pieces if piece.stored])
    arrays = [array.copy() for array in chain[at].arrays]
    arrays[piece.bucket][piece.start + dice.randrange(piece.stored)] ^= 1 << dice.randrange(8)
    return _damaged(chain, at, arrays=arrays)


def reordered(dice: random.Random, chain: Chain, other: Chain) -> Chain | None:
    at = len(chain) - 1
    arrays = list(chain[at].arrays)
    dice.shuffle(arrays)
    same = all(one is two for one, two in zip(arrays, chain[at].arrays, strict=True))
    return None if same else _damaged(chain, at, arrays=arrays)


def of_two_versions(dice: random.Random, chain: Chain, other: Chain) -> Chain | None:
    arrays = list(chain[-1].arrays)
    fitting = [
        n for n, array in enumerate(arrays) if n < len(other[-1].arrays) and other[-1].arrays[n].nbytes == array.nbytes
    ]
    if not fitting:
        return None
    number = dice.choice(fitting)
    arrays[number] = other[-1].arrays[number]
    return _damaged(chain, len(chain) - 1, arrays=arrays)


def replayed(dice: random.Random, chain: Chain, other: Chain) -> Chain | None:
    return [*chain, chain[-1]] if chain[-1].push.base_version is not None else None


def left_out(dice: random.Random, chain: Chain, other: Chain) -> Chain | None:
    return [*chain[:-2], chain[-1]] if len(chain) > 1 else None


def of_another_base(dice: random.Random, chain: Chain, other: Chain) -> Chain | None:
    push = chain[-1].push
    return (
        None
        if push.base_version is None
        else _damaged(chain, len(chain) - 1, replace(push, base_version=push.version + 7))
    )


def stale(dice: random.Random, chain: Chain, other: Chain) -> Chain:
    """The weights of an older version under the newest one's number and hashes."""
    old, new = other[0], chain[-1].push
    return [PackedPush(replace(old.push, version=new.version, tensors=new.tensors), old.arrays)]


def of_another_shard(dice: random.Random, chain: Chain, other: Chain) -> Chain | None:
    """Two pieces of equal size have each other's place."""
    pieces = list(chain[-1].push.pieces)
    pairs = [
        (a, b)
        for a in range(len(pieces))
        for b in range(a)
        if pieces[a].nbytes == pieces[b].nbytes
        and pieces[a].stored == pieces[b].stored
        and pieces[a].is_delta == pieces[b].is_delta
    ]
    if not pairs:
        return None
    a, b = dice.choice(pairs)
    one, two = pieces[a], pieces[b]
    pieces[a] = replace(one, tensor=two.tensor, first=two.first)
    pieces[b] = replace(two, tensor=one.tensor, first=one.first)
    return _damaged(chain, len(chain) - 1, replace(chain[-1].push, pieces=tuple(pieces)))


def without_a_piece(dice: random.Random, chain: Chain, other: Chain) -> Chain:
    pieces = list(chain[-1].push.pieces)
    del pieces[dice.randrange(len(pieces))]
    return _damaged(chain, len(chain) - 1, replace(chain[-1].push, pieces=tuple(pieces)))


def of_a_rank_that_died(dice: random.Random, chain: Chain, other: Chain) -> Chain:
    return _damaged(chain, dice.randrange(len(chain)), arrays=[LOST])


def swallowed(dice: random.Random, chain: Chain, other: Chain) -> Chain:
    """The engine's copy leaves one tensor out; see `Learner`."""
    return chain


LOST: Any = object()
KINDS: tuple[Fault, ...] = (
    truncated,
    flipped,
    reordered,
    of_two_versions,
    replayed,
    left_out,
    of_another_base,
    stale,
    of_another_shard,
    without_a_piece,
    of_a_rank_that_died,
    swallowed,
)


class Learner:
    """Two ranks and a ledger behind the queue's calls; every version is first served with a fault."""

    def __init__(self, present: Tensors) -> None:
        self.present, self.dice = present, random.Random(11)
        self.ranks = [Rank(present, rank, 2, bucket_bytes=2000) for rank in range(2)]
        self.ledger = Ledger[PackedPush]()
        self.version, self.whole_next = -1, True
        self.older: Chain = []
        self.faults = Counter[str]()
        self.swallowed, self.deltas = "", 0
        self.injected = True
        self.weights_after = Remote(self._weights_after)

    def train(self) -> None:
        """Make the next version: some elements move, now and then all of them."""
        self.version += 1
        share = 1.0 if self.dice.random() < 0.1 else 0.02
        for tensor in self.present.values():
            moved = torch.rand(tensor.shape) < share
            tensor[moved] = torch.randn(int(moved.sum())).to(tensor.dtype)
        packed = joined([rank.push(self.version, self.present, delta=not self.whole_next) for rank in self.ranks])
        self.ledger.publish(packed.push, packed)
        self.whole_next = self.ledger.reply_to("").wants_whole
        self.injected = False

    async def _weights_after(self, name: str, version: int, have: int) -> Any:
        if version >= self.version:
            await asyncio.Event().wait()
        chain = [entry.handle for entry in self.ledger.versions_after(have)]
        if not self.injected:
            self.injected = True
            tried = [(kind, kind(self.dice, chain, self.older or chain)) for kind in KINDS]
            possible = [(kind, served) for kind, served in tried if served is not None]
            kind, served = min(possible, key=lambda one: (self.faults[one[0].__name__], self.dice.random()))
            self.faults[kind.__name__] += 1
            self.swallowed = self.dice.choice(list(self.present)) if kind is swallowed else ""
            self.older = [entry.handle for entry in self.ledger.versions_after(-1)]
            chain = served
        else:
            self.swallowed = ""
        self.deltas += sum(packed.push.base_version is not None for packed in chain)
        return [(encode(packed.push), [_Ref(array) for array in packed.arrays]) for packed in chain]


class _Ref:
    """A reference of a bucket, as Ray's can be awaited."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        if self.array is LOST:
            raise ObjectLostError("0" * 56, None, "")
        return self.array


def of(engine: EmbeddedEngine, held: parameters.Parameters | None = None) -> Tensors:
    """The tensors with which an engine decodes, or others of its own, by name."""
    held, names = held or engine._decoder.parameters, engine._decoder._expected.keys()
    return {name: view for name, view in parameters.views(held, names, engine._decoder.head_width)}


@pytest.mark.parametrize("faults", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_many_faults_and_no_wrong_weight_is_ever_served(faults: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(puller, "RETRY_S", 0.0)
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(SETTINGS).to(torch.bfloat16)
    learner = Learner({name: tensor.detach().clone() for name, tensor in model.named_parameters()})
    engines, written = list[EmbeddedEngine](), fused_decoder.write

    def swallowing(into: torch.Tensor, values: torch.Tensor) -> int:
        """A tensor that the engine does not write: what it decodes with is still there."""
        if engines and learner.swallowed:
            spare = of(engines[0], engines[0]._decoder._spare)[learner.swallowed]
            if into.data_ptr() == spare.data_ptr():
                return written(into, of(engines[0])[learner.swallowed].to(values.dtype))
        return written(into, values)

    monkeypatch.setattr(fused_decoder, "write", swallowing)

    async def story() -> int:
        learner.train()
        learner.injected = True
        any_queue: Any = learner
        pull = puller.Puller("a", any_queue, object_store.ObjectStoreReceiver())
        await pull.newer(-1)
        engine = EmbeddedEngine(
            SETTINGS,
            pull.replica.tensors,
            version=0,
            slots=1,
            max_total_tokens=64,
            ends=EndTokens({1}),
            seed=0,
            dtype=torch.bfloat16,
        )
        engines.append(engine)
        follower = WeightSync(pull, engine, WholeModel())
        for _ in range(faults):
            for _ in range(learner.dice.choice([1, 1, 3])):
                learner.train()
            running = asyncio.create_task(follower.run())
            reached = asyncio.create_task(follower.reach(learner.version))
            await asyncio.wait({running, reached}, return_when=asyncio.FIRST_COMPLETED)
            assert reached.done(), running.exception()
            running.cancel()
            for name, view in of(engine).items():
                expected = learner.present[name]
                assert torch.equal(view.reshape(expected.shape), expected), (name, learner.version)
        await engine.stop()
        return engine.version

    assert asyncio.run(story()) == learner.version > faults
    assert sum(learner.faults.values()) == faults
    assert learner.faults.keys() == {kind.__name__ for kind in KINDS} and min(learner.faults.values()) >= 3
    assert learner.deltas > faults, "most versions went as deltas"
