"""The ways of buckets from ranks to actors: all bring the same bytes, and no end waits for one that has died."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from push_case import Remote

from streamppo.config import learner as chosen
from streamppo.config.sections import Config
from streamppo.errors import WeightsError
from streamppo.rollout import puller as pulling
from streamppo.rollout.puller import Puller
from streamppo.types import Push, decode
from streamppo.weights import factory, folder, object_store, transport
from streamppo.weights.buckets import Shard
from streamppo.weights.ledger import Ledger, PublishReply
from streamppo.weights.pusher import Pusher
from streamppo.weights.shares import RankShare, ShareCollector

KINDS = ("object_store", "folder", "nixl")
SOMETHING = np.arange(100_000, dtype=np.uint8)


class Value:
    """Stands in for a reference of Ray's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.copy()

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return self.array


@pytest.fixture(params=KINDS)
def ends(
    request: pytest.FixtureRequest, tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], tuple[transport.Sender, transport.Receiver]]:
    """Makes both ends of each transport for a rank, as its configuration says."""
    if request.param == "nixl":
        pytest.importorskip("nixl")
    monkeypatch.setattr(object_store.ray, "put", Value)
    path = f", path='{tmp_path}'" if request.param == "folder" else ""
    config = factory.with_run_folder(
        math_config(f"learner.transport={{kind='{request.param}'{path}}}"), tmp_path / "run"
    )
    factory.create_folder(config)
    ends = factory.ends(config)
    return lambda rank: (ends.sender(rank), ends.receiver())


class Queue:
    """The ledger behind the queue's calls: two ranks publish, one actor pulls."""

    def __init__(self) -> None:
        self.ledger, self.joining = Ledger[Any](), ShareCollector(self._join)
        self.weights_after = Remote(self._after)
        self.bases: list[int | None] = []

    async def publish(self, push: bytes, refs: list[Any]) -> PublishReply:
        return await self.joining.result(RankShare(decode(push, Push), refs, b""))

    async def _join(self, whole: RankShare[Any]) -> PublishReply:
        from streamppo.types import encode

        self.bases.append(whole.push.base_version)
        self.ledger.publish(whole.push, (encode(whole.push), whole.refs))
        return self.ledger.reply_to(whole.push.digest)

    async def _after(self, name: str, version: int, have: int) -> Any:
        return [entry.handle for entry in self.ledger.versions_after(have)]


def test_two_ranks_push_whole_versions_and_deltas_and_an_actor_has_each_of_them(
    ends: Callable[[int], tuple[transport.Sender, transport.Receiver]],
) -> None:
    async def story() -> None:
        loop, queue = asyncio.get_running_loop(), Queue()

        def publish(push: bytes, refs: list[Any], learned: bytes) -> PublishReply:
            return asyncio.run_coroutine_threadsafe(queue.publish(push, refs), loop).result(30)

        values = {"a": torch.randn(40, 50).to(torch.bfloat16), "b": torch.randn(1000)}
        halves = {name: (0, len(one) // 2, len(one)) for name, one in values.items()}
        pushers = [Pusher(publish, ends(rank)[0], 1500, deltas=True, rank=rank, ranks=2) for rank in range(2)]
        puller = Puller("a", queue, ends(0)[1])  # pyright: ignore[reportArgumentType]
        for version in range(30):
            for one in values.values():
                at = torch.rand(one.shape) < 0.03
                one[at] = torch.randn(int(at.sum())).to(one.dtype)
            for rank, pusher in enumerate(pushers):
                shards = {
                    name: Shard(one.dtype, tuple(one.shape), halves[name][rank], len(one) // 2)
                    for name, one in values.items()
                }
                filled = pusher.buckets(shards)
                for name, into in filled.tensors.items():
                    into.copy_(values[name][halves[name][rank] : halves[name][rank + 1]])
                await asyncio.to_thread(pusher.push, version, filled)
            await asyncio.gather(*(asyncio.wrap_future(pusher.last) for pusher in pushers))
            if version % 3 == 0:
                push = await puller.newer(version - 1)
                assert (
                    push.version == version and push.digest == queue.ledger.versions_after(version - 1)[-1].push.digest
                )
                for name, one in values.items():
                    assert torch.equal(puller.replica.tensors[name], one)
        assert queue.bases.count(None) >= 2 and queue.bases.count(None) < 15

    asyncio.run(story())


def test_memory_that_was_put_may_be_written_again_and_a_version_that_was_dropped_ends_for_those_that_begin_late(
    ends: Callable[[int], tuple[transport.Sender, transport.Receiver]],
) -> None:
    sender, receiver = ends(0)

    async def story() -> list[str]:
        array, refs, found = SOMETHING.copy(), list[Any](), list[str]()
        for version in range(6):
            array[:] = version
            refs += sender.put(version, [array, array[:0]])
            sender.drop(version)
        array[:] = 99
        for version in range(6):
            try:
                fetched = [await receiver.fetch(ref) for ref in refs[2 * version : 2 * version + 2]]
            except transport.BucketGone:
                found.append("lost")
                continue
            assert (fetched[0] == version).all() and len(fetched[0]) == len(SOMETHING) and len(fetched[1]) == 0
            found.append("there")
        return found

    found = asyncio.run(story())
    assert found[-2:] == ["there", "there"], "the newest, and the one that actors may be reading"
    if not isinstance(sender, object_store.ObjectStoreSender):
        assert found[:3] == ["lost"] * 3, "room is bounded"


def test_memory_that_is_written_while_it_is_read_is_lost_and_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    from streamppo.weights import nixl

    sender, receiver = nixl.NixlSender(local=True), nixl.NixlReceiver(local=True)
    real, reads = nixl.NixlReceiver._read, list[int]()

    def between(self: nixl.NixlReceiver, name: str, address: int, into: np.ndarray) -> None:
        reads.append(into.nbytes)
        real(self, name, address, into)
        if len(reads) == 1:
            for version in range(1, 4):
                sender.put(version, [SOMETHING])
                sender.drop(version)

    monkeypatch.setattr(nixl.NixlReceiver, "_read", between)
    (ref,) = sender.put(0, [SOMETHING])
    with pytest.raises(transport.BucketGone, match="by a newer one"):
        asyncio.run(receiver.fetch(ref))
    assert reads == [len(SOMETHING), 8]
    assert sender._blocks <= 3, "blocks are used again"


# --- deaths --------------------------------------------------------------------------------------------------


def _put(kind: str, path: str, pipe: Connection) -> None:
    """A rank in a process of its own: puts a version, and lives on."""
    if kind == "folder":
        sender: transport.Sender = folder.FolderSender(Path(path), 0)
    else:
        from streamppo.weights import nixl

        sender = nixl.NixlSender(local=True)
    pipe.send(sender.put(0, [SOMETHING]))
    time.sleep(600)


@pytest.mark.parametrize("kind", ["folder", "nixl"])
def test_a_rank_that_is_killed_leaves_nobody_waiting(kind: str, tmp_path: Path) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_put, args=(kind, str(tmp_path), theirs))
    rank.start()
    (ref,) = ours.recv()

    async def fetched() -> bool:
        receiver = made(kind)
        assert np.array_equal(await receiver.fetch(ref), SOMETHING)
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
        try:
            return np.array_equal(await asyncio.wait_for(receiver.fetch(ref), 60), SOMETHING)
        except transport.BucketGone:
            return False

    # A folder outlives its rank: the ledger no longer names its files.
    assert asyncio.run(fetched()) == (kind == "folder")


def made(kind: str) -> transport.Receiver:
    if kind == "folder":
        return folder.FolderReceiver()
    from streamppo.weights import nixl

    return nixl.NixlReceiver(local=True)


def test_a_rank_that_stands_still_is_given_up_and_the_read_that_it_owes_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl")
    from streamppo.weights import nixl

    monkeypatch.setattr(nixl, "READ_S", 0.3)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_put, args=("nixl", "", theirs))
    rank.start()
    assert rank.pid is not None
    (ref,) = ours.recv()
    os.kill(rank.pid, signal.SIGSTOP)
    receiver = nixl.NixlReceiver(local=True)
    try:
        with pytest.raises(transport.BucketGone, match="did not arrive in time"):
            asyncio.run(receiver.fetch(ref))
    finally:
        rank.kill()
        rank.join()


def test_lost_buckets_are_asked_for_again_and_the_version_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "RETRY_S", 0.0)
    asked: list[int] = []

    class Losing:
        async def fetch(self, ref: Any) -> np.ndarray:
            if isinstance(ref, str):
                raise transport.BucketGone
            return ref

    from streamppo.types import encode
    from streamppo.weights import buckets

    first = buckets.pack_whole(0, {"w": torch.zeros(1000)}, 1 << 20)
    filled = buckets.Buckets({"w": Shard.whole(torch.zeros(1000))}, 1 << 20)
    before = buckets.Buckets({"w": Shard.whole(torch.zeros(1000))}, 1 << 20)
    filled.tensors["w"][3] = 5.0
    second = filled.push(1, before)

    async def after(name: str, version: int, have: int) -> Any:
        asked.append(have)
        if version < 0:
            return [(encode(first.push), first.arrays)]
        return [(encode(second.push), ["lost"] if len(asked) < 5 else second.arrays)]

    async def story() -> None:
        queue: Any = type("Queue", (), {"weights_after": Remote(after)})
        puller = Puller("a", queue, Losing())
        await puller.newer(-1)
        await puller.newer(0)
        assert puller.replica.tensors["w"][3] == 5.0 and puller.replica.version == 1

    asyncio.run(story())
    assert second.push.base_version == 0 and asked == [-1, 0, 0, 0, 0]


def test_buckets_of_a_rank_that_never_answers_are_lost_and_a_slow_network_gets_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "FETCH_S", 0.1)
    monkeypatch.setattr(object_store, "LONGER_S", 0.2)

    async def comes_after(seconds: float) -> np.ndarray:
        await asyncio.sleep(seconds)
        return SOMETHING

    async def story() -> None:
        receiver: Any = object_store.ObjectStoreReceiver()
        together = await asyncio.gather(*(receiver.fetch(comes_after(60)) for _ in range(9)), return_exceptions=True)
        assert all(isinstance(one, transport.BucketGone) for one in together)
        assert await receiver.fetch(comes_after(0.15)) is SOMETHING
        with pytest.raises(transport.BucketGone, match=r"did not arrive within 0\.1 s"):
            await receiver.fetch(comes_after(0.15))

    asyncio.run(story())


@pytest.mark.slow
def test_an_actor_that_asks_a_dead_rank_for_weights_gets_those_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FETCH_S", 0.1)
    monkeypatch.setattr(pulling, "RETRY_S", 0.0)
    from streamppo.types import encode
    from streamppo.weights import buckets

    packed = buckets.pack_whole(0, {"w": torch.ones(3)}, 1 << 20)
    asked: list[int] = []

    async def story() -> None:
        async def after(name: str, version: int, have: int) -> Any:
            asked.append(have)
            # The first rank has died, and Ray does not say so.
            return [(encode(packed.push), [answer(60 if len(asked) < 3 else 0)])]

        async def answer(after_s: float) -> np.ndarray:
            await asyncio.sleep(after_s)
            return packed.arrays[0]

        queue: Any = type("Queue", (), {"weights_after": Remote(after)})
        puller = Puller("a", queue, object_store.ObjectStoreReceiver())
        async with asyncio.timeout(30):
            await puller.newer(-1)
        assert puller.replica.tensors["w"][2] == 1.0

    asyncio.run(story())
    assert asked == [-1, -1, -1]


# --- folders -------------------------------------------------------------------------------------------------


def test_a_folder_holds_two_whole_versions_and_forgets_the_rank_that_died(tmp_path: Path) -> None:
    dead = folder.FolderSender(tmp_path, 0)
    dead.put(7, [SOMETHING])
    other = folder.FolderSender(tmp_path, 1)
    other.put(0, [SOMETHING])
    sender = folder.FolderSender(tmp_path, 0)
    for version in range(20):
        sender.put(version, [SOMETHING, SOMETHING])
        if not version:
            assert len(list(tmp_path.rglob("*-*-*/*"))) == 4
        sender.drop(version)
        assert len(list(sender._folder.iterdir())) <= 4
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == ["rank-0-", "rank-1-"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_that_is_cut_off_is_refused_and_one_that_stays_away_ends_the_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = folder.FolderSender(tmp_path, 0), folder.FolderReceiver()
    (ref,) = sender.put(0, [SOMETHING])
    (path,) = sender._folder.iterdir()
    os.truncate(path, 10)
    assert len(asyncio.run(receiver.fetch(ref))) == 10, "the replica compares"
    path.unlink()
    for _ in range(3):
        with pytest.raises(transport.BucketGone):
            asyncio.run(receiver.fetch(ref))
    monkeypatch.setattr(folder, "MISSING_S", 0.0)
    with pytest.raises(WeightsError, match=rf"{path.name} cannot be read.*learner.transport.path must be a folder"):
        asyncio.run(receiver.fetch(ref))


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"file/rank-0-.*cannot be written"):
        folder.FolderSender(tmp_path / "file", 0).put(0, [SOMETHING])


def test_runs_of_one_name_have_folders_of_their_own_and_leave_nothing(
    tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    config = math_config(f"learner.transport={{kind='folder', path='{tmp_path}/shared'}}")
    first, second = (factory.with_run_folder(config, tmp_path / parent / "math") for parent in ("a", "b"))
    assert first != second
    for one in (first, second):
        factory.create_folder(one)
        factory.ends(one).sender(0).put(0, [SOMETHING])
    assert len(list((tmp_path / "shared").rglob("00000000-0"))) == 2
    factory.create_folder(first)
    assert len(list((tmp_path / "shared").rglob("00000000-0"))) == 1, "an earlier driver's ranks are dead"
    factory.delete_folder(first)
    factory.delete_folder(second)
    assert not list((tmp_path / "shared").iterdir())
    own = factory.with_run_folder(math_config("learner.transport={kind='folder'}"), tmp_path / "a" / "math")
    assert own.learner.transport == chosen.Folder(str(tmp_path / "a" / "math" / "weights"))


# --- NIXL ----------------------------------------------------------------------------------------------------


def test_without_nixl_its_transport_says_how_it_is_installed(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamppo.weights import nixl

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(nixl, "import_module", missing)
    config = math_config("learner.transport={kind='nixl'}")
    for end in (lambda: factory.ends(config).sender(0), factory.ends(config).receiver):
        with pytest.raises(WeightsError, match=r"needs NIXL .*pip install 'streamppo\[nixl\]'"):
            end()


LISTENERS = """
import json, os, sys
from streamppo.weights import nixl
nixl.NixlSender(local=sys.argv[1] == "local")
places = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
mine = {os.readlink(place)[8:-1] for place in places if os.path.islink(place)}
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
print(json.dumps([row[1].partition(":")[0] for row in rows if row[9] in mine and row[3] == "0A"]))
"""


def test_memory_of_a_local_run_is_reached_from_this_machine_alone() -> None:
    pytest.importorskip("nixl")
    done = subprocess.run([sys.executable, "-c", LISTENERS, "local"], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) == {"0100007F"}
