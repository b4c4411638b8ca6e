"""The actors of a machine have one copy of each version, and any of them may die at any time."""

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.synchronize import Event as EventType
from threading import Thread
from typing import Any
from uuid import uuid4

import learner_case
import msgspec
import numpy as np
import pytest
import ray
import torch
from fake_sglang import CONFIG, Fake
from push_case import Rank, Remote, joined
from torch import Tensor

from streamppo.config.sections import Config
from streamppo.errors import WeightsError
from streamppo.rollout import build, machine_weights
from streamppo.rollout.machine_weights import Leader, MachinePuller
from streamppo.rollout.puller import Puller
from streamppo.rollout.sglang import engine as sglang
from streamppo.rollout.sglang.session import SessionSetup
from streamppo.rollout.weight_checks import Architecture
from streamppo.types import Push, encode
from streamppo.weights import shared_memory
from streamppo.weights.content import hash_tensor
from streamppo.weights.replica import Replica
from streamppo.weights.shared_memory import SharedTensors

BLOCK = 4096
WAIT_S = 30.0


class Ledger:
    """The queue's announcement of versions; `asked` are the names of those that call."""

    def __init__(self, *pushes: tuple[Push, list[np.ndarray]]) -> None:
        self.pushes = [*pushes]
        self.asked: list[str] = []
        self.weights_after = Remote(self._after)

    async def _after(self, name: str, version: int, have: int) -> list[Any]:
        self.asked.append(name)
        for _ in range(200):
            chain = [pushed for pushed in self.pushes if pushed[0].version > have]
            if chain and chain[-1][0].version > version:
                whole = max((at for at, (push, _) in enumerate(chain) if push.base_version is None), default=0)
                return [(encode(push), arrays) for push, arrays in chain[whole:]]
            await asyncio.sleep(0.005)
        return []


class Bytes:
    """A receiver whose references are the bytes; counts what was fetched."""

    def __init__(self) -> None:
        self.fetched = 0

    async def fetch(self, ref: Any) -> np.ndarray:
        self.fetched += 1
        return ref


def values(version: int, count: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    made: dict[str, Tensor] = {f"t{n}": torch.randn(700 + n, generator=generator) for n in range(count)}
    return made | {"small": torch.tensor(float(version)), "half": torch.randn(3, 7, generator=generator).bfloat16()}


def push(version: int, tensors: Mapping[str, Tensor], ranks: int = 2) -> tuple[Push, list[np.ndarray]]:
    return joined([Rank(tensors, rank, ranks).push(version, tensors) for rank in range(ranks)])


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_weights, "POLL_S", 0.2)
    monkeypatch.setattr(machine_weights, "RETRY_S", 0.02)


@pytest.fixture
def puller() -> Iterator[Callable[..., MachinePuller]]:
    """Makes pullers of one machine and one life; the leader's name is given up at the end."""
    life, made = uuid4().hex, list[MachinePuller]()

    def make(name: str, ledger: Any, receiver: Any = None, *, block_bytes: int = BLOCK) -> MachinePuller:
        made.append(MachinePuller(name, ledger, receiver or Bytes(), namespace=life, block_bytes=block_bytes))
        return made[-1]

    yield make
    for one in made:
        if one._leading is not None:
            one._leading.leader.close()


def inodes(shared: SharedTensors | None) -> list[int]:
    assert shared is not None
    return [os.fstat(descriptor).st_ino for descriptor in shared.descriptors()]


def same(found: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    return found.keys() == sent.keys() and all(found[name].equal(sent[name]) for name in sent)


@pytest.mark.parametrize("block_bytes", [64, BLOCK, 1 << 20])
def test_one_actor_pulls_and_all_have_the_same_memory(puller: Callable[..., MachinePuller], block_bytes: int) -> None:
    async def story() -> None:
        ledger, receivers = Ledger(), [Bytes() for _ in range(4)]
        actors = [puller(f"a{n}", ledger, one, block_bytes=block_bytes) for n, one in enumerate(receivers)]
        kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        for version in range(4):
            ledger.pushes.append(push(version, values(version)))
            pushes = await asyncio.gather(*(one.newer(version - 1) for one in actors))
            assert [one.version for one in pushes] == [version] * 4
            assert len({tuple(inodes(one.replica.shared)) for one in actors}) == 1
            for one in actors:
                assert same(one.replica.tensors, values(version))
                assert one.replica.contents == {name: hash_tensor(of) for name, of in values(version).items()}
            kept.append((dict(actors[-1].replica.tensors), values(version)))
        assert [bool(one.fetched) for one in receivers].count(True) == 1, "one of them pulls"
        assert all(same(found, sent) for found, sent in kept), "a version never changes"

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_more_blocks_than_a_message_has_descriptors_arrive_in_order(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0, 450), ranks=1))
        actors = [puller(name, ledger, block_bytes=64) for name in "ab"]
        for one in actors:
            await one.newer(-1)
            assert same(one.replica.tensors, values(0, 450))
        shared = actors[1].replica.shared
        assert shared is not None and len(shared.blocks) > 2 * machine_weights.MOST_DESCRIPTORS

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_deltas_make_new_memory_from_that_of_their_base(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger, present = Ledger(), {"a": torch.randn(5000).bfloat16()}
        rank = Rank(present)
        ledger.pushes.append(joined([rank.push(0, present)]))
        actors, first = [puller(name, ledger) for name in "ab"], present["a"].clone()
        for one in actors:
            await one.newer(-1)
        old = [dict(one.replica.tensors) for one in actors]
        present["a"][::40] *= -1
        ledger.pushes.append(joined([rank.push(1, present, delta=True)]))
        assert ledger.pushes[1][0].base_version == 0
        for one in actors:
            await one.newer(0)
            assert one.replica.tensors["a"].equal(present["a"])
        assert all(tensors["a"].equal(first) for tensors in old)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_leader_whose_engine_is_slow_serves_the_others(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        slow, quick = puller("slow", ledger), puller("quick", ledger)
        await slow.newer(-1)
        for version in range(1, 5):
            ledger.pushes.append(push(version, values(version)))
            await quick.newer(version - 1)
            assert same(quick.replica.tensors, values(version))
        assert slow.replica.version == 0 and same(slow.replica.tensors, values(0))
        assert (await slow.newer(0)).version == 4
        assert "slow/machine" in ledger.asked and "quick/machine" not in ledger.asked

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_what_is_not_as_it_was_pushed_reaches_no_engine(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger()
        whole, arrays = push(0, values(0))
        wrong = [array.copy() for array in arrays]
        wrong[0][5] ^= 1
        ledger.pushes.append((whole, wrong))
        leader, follower = puller("a", ledger), puller("b", ledger)
        with pytest.raises(WeightsError, match="differs from what was pushed"):
            await leader.newer(-1)
        # The follower finds no leader any more, leads, and finds the same.
        with pytest.raises(WeightsError, match="differs from what was pushed"):
            await follower.newer(-1)
        assert (leader.replica.version, follower.replica.version) == (-1, -1)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_nothing_is_taken_from_another_user(
    puller: Callable[..., MachinePuller], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        leader, follower = puller("a", ledger), puller("b", ledger)
        await leader.newer(-1)
        monkeypatch.setattr(machine_weights, "_peer", lambda channel: os.getuid() + 1)
        with pytest.raises(WeightsError, match="another user's process has the name 'streamppo-"):
            await follower.newer(-1)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def lead(life: str, leads: EventType) -> None:
    """Lead in a process of its own, until it is killed."""

    async def forever() -> None:
        ledger = Ledger(push(0, values(0)))
        await MachinePuller("first", ledger, Bytes(), namespace=life, block_bytes=BLOCK).newer(-1)  # pyright: ignore[reportArgumentType]
        leads.set()
        await asyncio.sleep(60)

    asyncio.run(forever())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_dead_leader_another_actor_leads_and_what_it_gave_stays(
    number: signal.Signals,
) -> None:
    """A leader that was stopped holds the name until somebody kills it; nobody waits without end."""
    life = uuid4().hex
    leads = learner_case.processes().Event()
    child = learner_case.processes().Process(target=lead, args=(life, leads))
    child.start()

    async def story() -> None:
        assert await asyncio.to_thread(leads.wait, WAIT_S)
        ledger = Ledger(push(0, values(0)))
        one = MachinePuller("second", ledger, Bytes(), namespace=life, block_bytes=BLOCK)  # pyright: ignore[reportArgumentType]
        await one.newer(-1)
        assert one._leading is None and same(one.replica.tensors, values(0))
        kept = dict(one.replica.tensors)
        assert child.pid is not None
        os.kill(child.pid, number)
        ledger.pushes.append(push(1, values(1)))
        waiting = asyncio.create_task(one.newer(0))
        if number == signal.SIGSTOP:
            await asyncio.sleep(1.0)
            assert not waiting.done() and one._leading is None
            child.kill()
        await waiting
        assert one._leading is not None and same(one.replica.tensors, values(1))
        assert same(kept, values(0)), "the memory outlives the process that made it"
        one._leading.leader.close()

    try:
        asyncio.run(asyncio.wait_for(story(), WAIT_S))
    finally:
        child.kill()
        child.join()


def test_a_leader_answers_again_after_it_had_no_descriptor_or_thread_to_spare(
    puller: Callable[..., MachinePuller], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Thread):
        """The first follower's thread cannot be started."""

        left = 1

        def start(self) -> None:
            if self.name != "weights" and Failing.left:
                Failing.left -= 1
                raise RuntimeError("can't start new thread")
            super().start()

    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        leader, follower = puller("a", ledger), puller("b", ledger)
        await leader.newer(-1)
        assert leading(leader)._listener.fileno() > 0
        accepts = [OSError(errno.EMFILE, "Too many open files")] * 3
        listening, real = leading(leader)._listener, socket.socket.accept

        def accept(of: socket.socket) -> Any:
            if of is listening and accepts:
                raise accepts.pop()
            return real(of)

        monkeypatch.setattr(socket.socket, "accept", accept)
        # The thread waits in the real call: this follower ends it.
        await follower.newer(-1)
        ledger.pushes.append(push(1, values(1)))
        await follower.newer(0)
        assert not accepts and not Failing.left and same(follower.replica.tensors, values(1))

    monkeypatch.setattr(machine_weights, "Thread", Failing)
    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def leading(one: MachinePuller) -> Leader:
    assert one._leading is not None
    return one._leading.leader


def test_a_leader_waits_for_room(
    puller: Callable[..., MachinePuller], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = [2, 10**9]

    def usage(path: object) -> Any:
        full[0] -= 1
        return type("Usage", (), {"free": 10 if full[0] >= 0 else full[1]})

    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        one = puller("a", ledger)
        await one.newer(-1)
        assert same(one.replica.tensors, values(0))
        monkeypatch.setattr(machine_weights, "ROOM_S", 0.05)
        full[:] = [10**9, 0]
        ledger.pushes.append(push(1, values(1)))
        with pytest.raises(WeightsError, match="a version takes"):
            await one.newer(0)
        full[0] = 0
        full[1] = 10**9
        assert (await one.newer(0)).version == 1, "it leads again"

    monkeypatch.setattr(shared_memory.shutil, "disk_usage", usage)
    asyncio.run(asyncio.wait_for(story(), WAIT_S))
    assert caplog.text.count("waits until older versions are freed") == 2


def test_a_leader_that_cannot_pull_gives_the_name_to_another(puller: Callable[..., MachinePuller]) -> None:
    """Its own engine does not ask meanwhile: it swaps, or starts."""

    class Broken(Bytes):
        async def fetch(self, ref: Any) -> np.ndarray:
            raise RuntimeError("out of luck")

    async def story() -> None:
        ledger = Ledger()
        broken, other = puller("a", ledger, Broken()), puller("b", ledger)
        assert broken._lead()
        ledger.pushes.append(push(0, values(0)))
        await other.newer(-1)
        assert other._leading is not None and same(other.replica.tensors, values(0))
        with pytest.raises(RuntimeError, match="out of luck"):
            await broken.newer(-1)
        assert (await broken.newer(-1)).version == 0 and broken._leading is None

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_damaged_memory_is_found_when_an_engine_refuses_it_and_its_leader_resigns(
    puller: Callable[..., MachinePuller],
) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        leader, follower = puller("a", ledger), puller("b", ledger)
        for one in (leader, follower):
            await one.newer(-1)
            one.replica.forget()
            await one.newer(-1)
            assert same(one.replica.tensors, values(0)), "an engine's refusal alone changes nothing"
        follower.replica.tensors["t0"][3] += 1
        for one in (follower, leader):
            one.replica.forget()
            with pytest.raises(WeightsError, match="t0 differs from what was pushed"):
                await one.newer(-1)
        assert leader._leading is None
        await follower.newer(-1)
        assert follower._leading is not None and same(follower.replica.tensors, values(0))

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_forked_child_does_not_keep_the_name(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        leader, follower = puller("a", ledger), puller("b", ledger)
        await leader.newer(-1)
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        try:
            await follower.newer(-1)
            leading(leader).close()
            ledger.pushes.append(push(1, values(1)))
            await follower.newer(0)
            assert follower._leading is not None and same(follower.replica.tensors, values(1))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_machine_without_such_names_is_told(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        one = puller("a", ledger)
        one._address += "x" * 200
        with pytest.raises(WeightsError, match="the actors of this machine cannot share weights"):
            await one.newer(-1)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_version_that_does_not_come_is_said_once(
    puller: Callable[..., MachinePuller], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_weights, "LONG_S", 0.1)
    monkeypatch.setattr(machine_weights, "POLL_S", 0.05)

    async def story() -> None:
        ledger, empty = Ledger(), Ledger()
        ledger.pushes.append(push(3, values(3)))
        leader, follower = puller("a", empty), puller("b", ledger)
        assert leader._lead()
        waiting = asyncio.create_task(follower.newer(-1))
        await asyncio.sleep(1.0)
        waiting.cancel()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
    assert caplog.text.count("version 3 has not come from this machine's leader") == 1


def test_a_chain_of_deltas_copies_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[int]] = []

    def memory(sizes: Sequence[int]) -> SharedTensors:
        made.append(sizes)
        return shared_memory.new(sizes, BLOCK)

    replica, present = Replica(memory), {"a": torch.randn(5000).bfloat16()}
    rank = Rank(present)
    replica.take(*joined([rank.push(0, present)]))
    given, first = replica.detach(), present["a"].clone()
    for version in range(1, 6):
        present["a"][version::40] *= -1
        replica.take(*joined([rank.push(version, present, delta=True)]))
        assert replica.tensors["a"].equal(present["a"])
    assert len(made) == 2, "the base was given away, the versions between were not"
    assert given.parts[0].view(torch.bfloat16).equal(first)


def test_tensors_without_elements_and_of_odd_sizes_cross(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger()
        tensors = {
            "nothing": torch.zeros(0, 3),
            "large": torch.randn(3000),
            "also nothing": torch.zeros(0),
            **{f"odd{n}": torch.randn(n).to(torch.float16) for n in (1, 3, 65)},
        }
        ledger.pushes.append(push(0, tensors, ranks=1))
        for one in (puller("a", ledger), puller("b", ledger)):
            await one.newer(-1)
            assert same(one.replica.tensors, tensors)

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_an_engine_uses_shared_tensors_where_they_are() -> None:
    sizes = {name: torch.zeros(shape) for name, shape in Architecture(CONFIG).shapes.items()}

    def version(number: float) -> dict[str, Tensor]:
        memory = shared_memory.new([one.nbytes for one in sizes.values()], BLOCK)
        made = {
            name: part.view(one.dtype).reshape(one.shape).fill_(number)
            for (name, one), part in zip(sizes.items(), memory.parts, strict=True)
        }
        return made

    async def story() -> None:
        fake = Fake()
        shared: Any = {"shared": True, "eos_ids": [1], "context": 16}
        setup = SessionSetup(fake.start, fake.connect, "keep", 16, 5.0, **shared)  # pyright: ignore[reportArgumentType]
        first, second = version(1.0), version(2.0)
        engine = await sglang.start(setup, Architecture(CONFIG), 0, first)
        await engine.update_weights(1, second, {name: hash_tensor(one) for name, one in second.items()})
        assert not engine._copies._served and not engine._copies._spare
        assert {one.data_ptr() for one in engine._tensors.values()} == {one.data_ptr() for one in second.values()}
        await engine.stop()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


SGLANG = "rollout.engine={kind='sglang'"


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ((SGLANG + "}",), True),
        ((SGLANG + ", transport='group'}",), False),
        ((SGLANG + ", urls=['http://localhost:1']}",), False),
        ((SGLANG + "}", "model.lora.rank=4"), False),
        ((), False),
    ],
)
def test_engines_that_read_shared_memory_share_it(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], shares: bool
) -> None:
    context: Any = type("Context", (), {"namespace": "n"})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    made = build.puller(math_config(*overrides), "a", None, Bytes())  # pyright: ignore[reportArgumentType]
    assert isinstance(made, MachinePuller) is shares and isinstance(made, Puller)


def test_memory_of_other_sizes_is_refused_and_its_descriptors_are_closed() -> None:
    shared = shared_memory.new([100, 200], BLOCK)
    descriptors = [os.dup(one) for one in shared.descriptors()]
    with pytest.raises(WeightsError, match="the shared memory has blocks of"):
        shared_memory.attach(descriptors, [100, 9000], BLOCK)
    for one in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(one)


def test_a_follower_that_says_nothing_holds_nobody_up(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger(push(0, values(0)))
        leader, follower = puller("a", ledger), puller("b", ledger)
        await leader.newer(-1)
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(5)]
        for channel in silent:
            channel.connect(leader._address)
        await follower.newer(-1)
        assert same(follower.replica.tensors, values(0))
        for channel in silent:
            channel.close()

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_version_crosses_with_every_field_of_its_push(puller: Callable[..., MachinePuller]) -> None:
    async def story() -> None:
        ledger = Ledger()
        whole, arrays = push(0, values(0))
        ledger.pushes.append((msgspec.structs.replace(whole, admitted_lag=3), arrays))
        leader, follower = puller("a", ledger), puller("b", ledger)
        first, second = await leader.newer(-1), await follower.newer(-1)
        assert first == second and second.admitted_lag == 3

    asyncio.run(asyncio.wait_for(story(), WAIT_S))
