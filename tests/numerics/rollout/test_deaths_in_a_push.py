"""kill -9 of either side in the exact middle of a push or a swap: nobody waits, and no wrong weight is ever served.

Ranks and actors are processes of their own here, with files between them; the queue is the test.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import deaths_case
import pytest
import torch
from deaths_case import ACTOR_DIES, RANK_DIES, SETTINGS, Chain, carried
from push_case import Rank, Remote, Tensors
from transformers import Qwen2ForCausalLM

from streamppo.rollout.embedded import fused_decoder, parameters
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.puller import Puller
from streamppo.rollout.weight_sync import WeightSync
from streamppo.types import Push, decode, encode
from streamppo.weights import folder
from streamppo.weights.adapters import WholeModel
from streamppo.weights.ledger import Ledger
from streamppo.weights.shares import join

ROUNDS = 3


class Learner:
    """Two ranks, of which each life is a group's, and the ledger behind the queue's calls."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(SETTINGS).to(torch.bfloat16)
        self.present: Tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.path, self.version = path, -1
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["deaths_case"])
        self.weights_after = Remote(self._after)
        self.newer = asyncio.Event()
        self.begin_group()

    def begin_group(self) -> None:
        """Ranks in the place of dead ones: a ledger without anything, and memory without versions."""
        self.senders = [folder.FolderSender(self.path, rank) for rank in range(2)]
        self.ranks = [Rank(self.present, rank, 2, bucket_bytes=700) for rank in range(2)]
        self.ledger, self.whole_next = Ledger[tuple[bytes, list[bytes]]](), True

    def train(self) -> None:
        self.version += 1
        for tensor in self.present.values():
            moved = torch.rand(tensor.shape) < 0.02
            tensor[moved] = torch.randn(int(moved.sum())).to(tensor.dtype)

    def publish(self, version: int | None = None) -> None:
        """Push what is present, as a delta where that is less."""
        version = self.version if version is None else version
        made = [rank.push(version, self.present, delta=not self.whole_next) for rank in self.ranks]
        refs: list[Any] = [
            ref for sender, one in zip(self.senders, made, strict=True) for ref in sender.put(version, one.arrays)
        ]
        push = join([one.push for one in made])
        self.ledger.publish(push, (encode(push), refs))
        answer = self.ledger.reply_to(push.digest)
        for sender in self.senders:
            sender.drop(answer.whole)
        self.whole_next = answer.wants_whole
        self.newer.set()

    def chain(self, have: int = -1) -> Chain:
        return [entry.handle for entry in self.ledger.versions_after(have)]

    async def _after(self, name: str, version: int, have: int) -> Chain:
        while (self.ledger.newest or 0) <= version or self.ledger.newest is None:
            self.newer.clear()
            await self.newer.wait()
        return self.chain(have)


async def follower_of(learner: Learner) -> WeightSync:
    """An actor in this process, which begins with the newest version."""
    queue: Any = learner
    puller = Puller("a", queue, folder.FolderReceiver())
    push = await puller.newer(-1)
    engine = EmbeddedEngine(
        SETTINGS,
        puller.replica.tensors,
        version=push.version,
        slots=1,
        max_total_tokens=64,
        ends=EndTokens({1}),
        seed=0,
        dtype=torch.bfloat16,
    )
    return WeightSync(puller, engine, WholeModel())


def serves(follower: WeightSync, expected: Tensors) -> bool:
    """Tell if an engine decodes with exactly these tensors."""
    made: Any = follower.engine
    held, names = made._decoder.parameters, made._decoder._expected.keys()
    return all(
        torch.equal(view.reshape(expected[name].shape), expected[name])
        for name, view in parameters.views(held, names, made._decoder.head_width)
    )


async def ended(process: Any) -> int | None:
    await asyncio.to_thread(process.join, 120)
    return process.exitcode


@pytest.mark.timeout(600)
def test_either_side_is_killed_in_the_middle_of_a_push_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = Counter[str]()
    # Python 3.11 does not hand it over to the process that loads libraries once for all that are killed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    async def story() -> None:
        learner = Learner(tmp_path)
        learner.train()
        learner.publish()
        survivor = await follower_of(learner)
        following = asyncio.create_task(survivor.run())
        for dies in [*ACTOR_DIES] * ROUNDS:
            before = learner.chain()
            learner.train()
            learner.publish()
            # What a late actor lacks, or the whole: pushes continue while it dies.
            after = learner.chain(decode(before[-1][0], Push).version)
            actor = learner.context.Process(target=deaths_case.actor, args=(before, after, dies))
            actor.start()
            assert await ended(actor) == -signal.SIGKILL, dies
            deaths[dies] += 1
            await asyncio.wait_for(survivor.reach(learner.version), 60)
            assert serves(survivor, learner.present)
        replacement = await follower_of(learner)
        assert serves(replacement, learner.present) and replacement.digest == survivor.digest
        for dies in [*RANK_DIES] * ROUNDS:
            served = {name: tensor.clone() for name, tensor in learner.present.items()}
            learner.train()
            ours, theirs = learner.context.Pipe()
            arguments = (str(tmp_path), 1, learner.version, carried(learner.present), theirs, dies)
            rank = learner.context.Process(target=deaths_case.rank, args=arguments)
            rank.start()
            theirs.close()
            assert await ended(rank) == -signal.SIGKILL, dies
            assert not ours.poll() or not received_anything(ours), "a rank that died has told of its share"
            deaths[dies] += 1
            assert not following.done() and serves(survivor, served), "the engine keeps what it has"
            # The driver ends the rank that is left; the next group makes the version again.
            learner.begin_group()
            learner.publish()
            await asyncio.wait_for(survivor.reach(learner.version), 60)
            assert serves(survivor, learner.present)
        assert {path.name[:7] for path in tmp_path.iterdir()} == {"rank-0-", "rank-1-"}
        assert len(list(tmp_path.iterdir())) == 2, "nothing is left of the dead"
        following.cancel()
        for one in (survivor, replacement):
            await one.engine.stop()

    asyncio.run(story())
    assert deaths == dict.fromkeys([*ACTOR_DIES, *RANK_DIES], ROUNDS)


def received_anything(pipe: Any) -> bool:
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def test_a_swap_that_sleeps_while_beats_go_on_and_versions_pass_by_ends_at_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, beats, compared = Counter[str](), threading.Semaphore(0), fused_decoder.compare

    def sleepy(expected: Any, held: Any) -> None:
        # Far beyond a heartbeat: ten of them come while the engine stands in its swap, or none ever would.
        slept["beats"] += sum(1 for _ in itertools.takewhile(lambda _: beats.acquire(timeout=20), range(10)))
        slept["swaps"] += 1
        compared(expected, held)

    async def story() -> None:
        learner = Learner(tmp_path)
        learner.train()
        learner.publish()
        follower = await follower_of(learner)
        monkeypatch.setattr(fused_decoder, "compare", sleepy)

        async def beat() -> None:
            while True:
                beats.release()
                await asyncio.sleep(0.005)

        running = [asyncio.create_task(follower.run()), asyncio.create_task(beat())]
        for _ in range(10):
            for _ in range(4):
                learner.train()
                learner.publish()
                await asyncio.sleep(0.01)
            await asyncio.wait_for(follower.reach(learner.version), 60)
            assert serves(follower, learner.present)
        for one in running:
            one.cancel()
        await follower.engine.stop()

    asyncio.run(story())
    assert 10 <= slept["swaps"] < 40, "versions that passed by were not pulled alone"
    assert slept["beats"] == 10 * slept["swaps"]


def test_files_of_a_group_that_died_go_while_an_engine_reads_them_and_it_takes_those_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reads = folder._read, Counter[str]()

    async def story() -> None:
        learner = Learner(tmp_path)
        learner.train()
        learner.publish()
        follower = await follower_of(learner)

        def read(file: folder.File) -> Any:
            reads["all"] += 1
            if reads["all"] == 2:
                learner.begin_group()
                learner.publish()
            return real(file)

        learner.train()
        learner.whole_next = True
        learner.publish()
        monkeypatch.setattr(folder, "_read", read)
        running = asyncio.create_task(follower.run())
        await asyncio.wait_for(follower.reach(learner.version), 60)
        assert serves(follower, learner.present) and not running.done()
        running.cancel()
        await follower.engine.stop()

    asyncio.run(story())
    assert reads["all"] > 2
