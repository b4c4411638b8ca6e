"""The worker of a rollout actor without Ray: versions that it follows, failures that cost one trajectory each."""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from push_case import Remote

from streamppo.config.sections import Config
from streamppo.errors import (
    EnvironmentFailed,
    ModelError,
    RewardFailed,
    RunError,
    TaskError,
    TeacherFailed,
    WeightsError,
)
from streamppo.rollout import weight_sync
from streamppo.rollout.episode import Episode
from streamppo.rollout.puller import Puller
from streamppo.rollout.weight_sync import WeightSync
from streamppo.rollout.worker import GATHER_S, Worker
from streamppo.tasks.stop import Stop
from streamppo.types import (
    EvaluationReport,
    Failure,
    Identity,
    Prompt,
    Reward,
    ScoredText,
    ScorerReport,
    Ticket,
    Trajectory,
    decode,
    encode,
)
from streamppo.weights import buckets, object_store
from streamppo.weights.adapters import WholeModel
from streamppo.weights.content import check

pytest_plugins = ["rollout_log"]


class Queue:
    """Serves one version; the first `damaged` pulls of it arrive with a flipped bit."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged
        self.pulls = 0
        self.had: list[int] = []
        self.weights_after = Remote(self._weights_after)

    async def _weights_after(self, name: str, version: int, have: int) -> Any:
        if version >= 1:
            await asyncio.Event().wait()
        self.pulls += 1
        self.had.append(have)
        push, arrays = buckets.pack_whole(1, {"w": torch.arange(8.0)}, 1 << 20)
        if self.pulls <= self.damaged:
            arrays[0][3] ^= 1
        return [(encode(structs.replace(push, admitted_lag=3)), [_value(array) for array in arrays])]


async def _value(array: Any) -> Any:
    return array


class Engine:
    version = 0

    async def update_weights(self, version: int, tensors: Any, contents: Any) -> None:
        check(contents, tensors.items())
        assert torch.equal(tensors["w"], torch.arange(8.0))
        self.version = version


def at_version_0(queue: Any) -> Puller:
    puller = Puller("rollout-0", queue, object_store.ObjectStoreReceiver())
    puller.replica.take(*buckets.pack_whole(0, {"w": torch.zeros(8)}, 1 << 20))
    return puller


def _engine() -> Any:
    return Engine()


def test_damaged_weights_are_refused_and_asked_for_again(log_lines: list[str]) -> None:
    async def scenario() -> Queue:
        queue: Any = Queue(damaged=weight_sync.PULLS - 1)
        made = WeightSync(at_version_0(queue), _engine(), WholeModel())
        task = asyncio.create_task(made.run())
        await made.reach(1)
        assert made.admitted_lag == 3
        assert made.push_ms > 0 and made.digest == buckets.pack_whole(1, {"w": torch.arange(8.0)}, 1).push.digest
        task.cancel()
        return queue

    queue = asyncio.run(scenario())
    assert queue.pulls == weight_sync.PULLS
    assert queue.had == [0, -1, -1], "after a damaged one it asks for a whole version"
    assert log_lines == ["keeps version 0: w differs from what was pushed (1 tensors differ)"] * 2


def test_weights_that_stay_damaged_end_the_actor() -> None:
    async def scenario() -> None:
        queue: Any = Queue(damaged=1000)
        with pytest.raises(WeightsError, match="w differs from what was pushed"):
            await WeightSync(at_version_0(queue), _engine(), WholeModel()).run()
        assert queue.pulls == weight_sync.PULLS

    asyncio.run(scenario())


# --- what costs one trajectory, and nothing else ---------------------------------------------------------------

FAULTS = {
    "too long": (ModelError("a prompt of 99 tokens does not fit"), "engine"),
    "no template": (TaskError("no chat template"), "task"),
    "no world": (EnvironmentFailed("reset: OSError: \ud83d"), "environment"),
    "no score": (RewardFailed("no score after 30 s"), "reward"),
}


class Player:
    """Says 2 to every prompt that does not name a fault."""

    tokenizer = SimpleNamespace(completion=lambda tokens, sampled=None: "2")
    stop = Stop()

    def prepare(self, prompt: Prompt) -> None:
        if prompt.text == "no template":
            raise FAULTS[prompt.text][0]

    async def play(self, prompt: Prompt, sampling: Any, cutter: Any = None) -> Episode:
        if prompt.text in FAULTS and prompt.text != "no score":
            raise FAULTS[prompt.text][0]
        one = np.ones(1, np.int32)
        return Episode(one, one, np.zeros(1, np.float32), 7 * one, one.astype(np.bool_), "stop", (0,))


class Rewards:
    """1 for the answer 2."""

    async def score(self, prompt: Prompt, text: ScoredText) -> Reward:
        if prompt.text == "no score":
            raise FAULTS["no score"][0]
        return Reward(score=float(text.completion == prompt.columns["answer"]))


class Tickets:
    """A queue that gives out one ticket for each prompt, all at once, and then nothing; it keeps every delivery."""

    def __init__(self, prompts: int) -> None:
        self.tickets = [Ticket(identity=Identity(task="t", prompt=n, sample=0), slot=n) for n in range(prompts)]
        self.asked: list[tuple[int, int]] = []
        self.limits: list[int] = []
        self.trajectories: list[Trajectory] = []
        self.failures: list[Failure] = []
        self.issue, self.deliver = Remote(self._issue), Remote(self._deliver)
        self.weights_after = Remote(self._weights_after)
        self.beats: list[float] = []
        self.beat = Remote(self._beat)

    async def _beat(self, actor: str) -> int:
        self.beats.append(asyncio.get_running_loop().time())
        return 4

    async def _issue(self, actor: str, version: int, room: int, call: int) -> bytes:
        self.asked.append((room, call))
        if call:
            await asyncio.Event().wait()
        return encode(tuple(self.tickets))

    async def _deliver(
        self, actor: str, cut_for: int, trajectories: bytes, failures: bytes, *, limit: int, **asked: int
    ) -> bytes:
        self.trajectories += decode(trajectories, tuple[Trajectory, ...])
        self.failures += decode(failures, tuple[Failure, ...])
        self.limits.append(limit)
        return encode(())

    async def _weights_after(self, name: str, version: int, have: int) -> None:
        await asyncio.Event().wait()


def working(config: Config, *texts: str) -> tuple[Worker, Tickets]:
    """A worker on a task with these prompts, and its queue."""
    prompts = [Prompt(text=text, columns={"answer": "2"}, source="sums") for text in texts]
    task: Any = SimpleNamespace(held_out=lambda limit: prompts, prompt=lambda number: prompts[number])
    task.sources = lambda: {"sums", "products"}
    player: Any = Player()
    rewards: Any = Rewards()
    queue: Any = Tickets(len(texts))
    engine: Any = SimpleNamespace(version=7)
    followed = WeightSync(at_version_0(queue), engine, WholeModel())
    return Worker(config, "rollout-0", queue, task, player, rewards, follower=followed), queue


@pytest.mark.parametrize("fault", FAULTS)
def test_a_held_out_prompt_that_fails_is_counted_and_named_and_the_others_are_judged(
    fault: str, math_config: Callable[..., Config], log_lines: list[str]
) -> None:
    async def story() -> EvaluationReport:
        worker, _ = working(math_config(), "1+1=", fault, "0+2=")
        return await worker.evaluate(0, 1, 7)

    report = asyncio.run(story())
    assert (report.correct, report.count, report.failed) == (2, 2, 1)
    assert (report.min_version, report.max_version) == (7, 7)
    error, stage = FAULTS[fault]
    assert report.reason == f"{stage}: {error}".replace("\ud83d", "?")
    assert log_lines == [], "an actor answers an evaluation in many parts: the driver logs one line"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trajectory_that_fails_is_delivered_as_a_failure_of_its_stage(
    fault: str, math_config: Callable[..., Config]
) -> None:
    async def story() -> Tickets:
        worker, queue = working(math_config(), "1+1=", fault)
        running = asyncio.create_task(worker.run())
        while len(queue.trajectories) + len(queue.failures) < 2:
            await asyncio.wait({running}, timeout=0.01)
        running.cancel()
        return queue

    queue = asyncio.run(story())
    (trajectory,), (failure,) = queue.trajectories, queue.failures
    assert (trajectory.reward, trajectory.actor, trajectory.identity.prompt) == (1.0, "rollout-0", 0)
    assert (failure.stage, failure.identity.prompt) == (FAULTS[fault][1], 1)
    assert (failure.version, failure.source, trajectory.source) == (7, "sums", "sums")
    in_flight = math_config().rollout.in_flight
    assert queue.asked[0] == (in_flight, 0)
    # Tickets that have arrived end the call, and the room that they took comes back.
    assert [call for _, call in queue.asked[1:]] == [1] * len(queue.asked[1:])
    assert in_flight - 2 <= queue.asked[-1][0] <= in_flight


def test_with_segments_no_more_is_under_way_than_cuts_have_room_for(math_config: Callable[..., Config]) -> None:
    """Four actors share a batch of 8, and segments are cut at an age of 1."""
    config = math_config("queue.segments={}", "queue.max_lag=2", "queue.batch_size=8", "rollout.actors=2")

    class Slow(Player):
        async def play(self, prompt: Prompt, sampling: Any, cutter: Any = None) -> Episode:
            await asyncio.Event().wait()
            raise AssertionError

    async def story() -> list[tuple[int, int]]:
        worker, queue = working(config, "1+1=")
        worker._player = Slow()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        running = asyncio.create_task(worker.run())
        while len(queue.asked) < 2:
            await asyncio.wait({running}, timeout=0.01)
        running.cancel()
        return queue.asked

    assert asyncio.run(story()) == [(2, 0), (1, 1)]


def test_every_trajectory_has_its_own_limit_and_greedy_answers_that_of_none(math_config: Callable[..., Config]) -> None:
    limits: list[int] = []

    class Noting(Player):
        async def play(self, prompt: Prompt, sampling: Any, cutter: Any = None) -> Episode:
            limits.append(sampling.max_tokens)
            return await super().play(prompt, sampling, cutter)

    async def story() -> None:
        name = f"{Path(__file__).parents[2] / 'support' / 'own_limit.py'}:by_prompt"
        worker, queue = working(math_config(f"rollout.limit={name}", "rollout.max_tokens=9"), "1+1=", "0+2=", "2+0=")
        worker._player = cast(Any, Noting())
        running = asyncio.create_task(worker.run())
        while len(queue.trajectories) + len(queue.failures) < 3:
            await asyncio.wait({running}, timeout=0.01)
        running.cancel()
        assert limits == [1, 9], "10 is more than max_tokens"
        assert [(one.stage, one.identity.prompt) for one in queue.failures] == [("task", 2)]
        assert "own_limit.py:12: ValueError: no limit for prompt 2" in queue.failures[0].reason
        await worker.evaluate(0, 1, 7)

    asyncio.run(story())
    assert limits[2:] == [5, 5, 5]


class Teacher:
    """Scores the first trajectory that it is asked about, and no other."""

    def __init__(self) -> None:
        self.asked = 0

    async def score(self, episode: Episode) -> bytes:
        self.asked += 1
        if self.asked > 1:
            raise TeacherFailed("status 503")
        return np.full(len(episode.tokens), -0.25, np.float32).tobytes()

    def report(self) -> ScorerReport:
        counts = {"calls": self.asked, "failed": self.asked - 1, "retries": 0, "respawns": 0}
        return ScorerReport(name="teacher", **counts, mean_s=0.0, max_s=0.0, reasons={})


def test_log_probs_of_a_teacher_travel_with_the_trajectory_and_without_them_it_is_a_failure_and_no_zero(
    math_config: Callable[..., Config],
) -> None:
    async def story() -> tuple[Tickets, Teacher]:
        worker, queue = working(math_config(), "1+1=", "0+2=")
        teacher: Any = Teacher()
        worker._teacher = teacher
        running = asyncio.create_task(worker.run())
        while len(queue.trajectories) + len(queue.failures) < 2:
            await asyncio.wait({running}, timeout=0.01)
        running.cancel()
        await worker.evaluate(0, 1, 7)
        return queue, teacher

    queue, teacher = asyncio.run(story())
    (trajectory,), (failure,) = queue.trajectories, queue.failures
    assert trajectory.teacher_logprobs == np.float32([-0.25]).tobytes() and trajectory.reward == 1.0
    assert (failure.stage, failure.reason) == ("teacher", "status 503")
    assert teacher.asked == 2, "evaluations have no need of it"


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop that waits for nothing: where there is nothing to do, its clock jumps to the next timer."""

    present = 0.0

    def time(self) -> float:
        return self.present

    def _run_once(self) -> None:
        timers: Any = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        if timers and not self._ready:  # pyright: ignore[reportAttributeAccessIssue]
            self.present = max(self.present, timers[0].when())
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


class SlowSwap:
    """An engine that takes 90 s for a swap."""

    version = 0

    async def update_weights(self, version: int, tensors: Any, contents: Any) -> None:
        await asyncio.sleep(90)
        self.version = version


class HangingSwap:
    """An engine that never ends a swap."""

    version = 0

    async def update_weights(self, version: int, tensors: Any, contents: Any) -> None:
        await asyncio.Event().wait()


def test_a_swap_that_hangs_ends_the_actor_with_its_version_and_the_bound_grows_with_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sync, "SWAP_S", 0.1)
    queue, engine = Queue(damaged=0), HangingSwap()

    async def ended() -> float:
        begin, named = time.monotonic(), r"rollout-0: the swap to version 1 \(0.0 GiB\) hangs: \d+ s have passed"
        with pytest.raises(RunError, match=named):
            await WeightSync(at_version_0(queue), cast("Any", engine), WholeModel()).run()
        return time.monotonic() - begin

    assert asyncio.run(ended()) < 5
    monkeypatch.setattr(weight_sync, "SLOWEST_BYTES_PER_S", 32 / 0.5)
    assert asyncio.run(ended()) > 0.5


class Full(Tickets):
    """A queue without a ticket for a full actor, and with one new version."""

    async def _issue(self, actor: str, version: int, room: int, call: int) -> bytes:
        return await asyncio.Event().wait() and b""

    async def _weights_after(self, name: str, version: int, have: int) -> Any:
        return await Queue(damaged=0)._weights_after(name, version, have)


def test_a_full_actor_gives_signs_of_life_during_a_swap_of_90_s(math_config: Callable[..., Config]) -> None:
    config = math_config("watchdog.heartbeat_s=10")

    async def story() -> list[float]:
        worker, _ = working(config)
        queue: Any = Full(0)
        engine: Any = SlowSwap()
        worker._queue, worker._follower = queue, WeightSync(at_version_0(queue), engine, WholeModel())
        running = asyncio.create_task(worker.run())
        swapped = asyncio.create_task(worker._follower.reach(1))
        await asyncio.wait({running, swapped}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done()
        running.cancel()
        return [*queue.beats, asyncio.get_running_loop().time()]

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        beats = runner.run(story())
    assert beats[-1] >= 90
    gaps = [late - early for early, late in itertools.pairwise(beats)]
    assert max(gaps) < config.watchdog.heartbeat_s


# --- segments --------------------------------------------------------------------------------------------------


class Aged(Player):
    """Says 2 in five tokens of three versions."""

    shares: list[float]

    async def play(self, prompt: Prompt, sampling: Any, cutter: Any = None) -> Episode:
        self.shares = [cutter.cuts(None, np.zeros(0, np.int32)).share]
        tokens = np.arange(1, 6, dtype=np.int32)
        versions = np.array([5, 5, 6, 6, 7], np.int32)
        return Episode(tokens[:1], tokens, np.zeros(5, np.float32), versions, np.ones(5, np.bool_), "stop", (4,))


class SlowRewards(Rewards):
    """A reward that comes once it is allowed to."""

    def __init__(self) -> None:
        self.allowed = asyncio.Event()

    async def score(self, prompt: Prompt, text: ScoredText) -> Reward:
        await self.allowed.wait()
        return await super().score(prompt, text)


class Heard(Tickets):
    """Notes the versions for which all was cut."""

    cut_for: list[int]

    async def _deliver(self, actor: str, cut_for: int, trajectories: bytes, failures: bytes, **asked: int) -> bytes:
        self.cut_for.append(cut_for)
        return await super()._deliver(actor, cut_for, trajectories, failures, **asked)


def test_a_completion_that_waits_for_its_reward_hands_over_what_is_due_and_the_queue_hears_what_it_keeps(
    math_config: Callable[..., Config],
) -> None:
    async def story() -> Heard:
        config = math_config("queue.segments={}", "queue.max_lag=4")
        worker, _ = working(config, "1+1=")
        queue: Any = Heard(1)
        queue.cut_for = []
        rewards: Any = SlowRewards()
        player: Any = Aged()
        worker._queue, worker._player, worker._rewards = queue, player, rewards
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(1.0)
        follower = worker._follower
        for version in (8, 9, 10):
            cast(Any, follower.engine).version = version
            async with follower._swapped:
                follower._swapped.notify_all()
            # Sooner than the next sign of life, which would bring a delivery too.
            await asyncio.sleep(3 * GATHER_S)
        assert not running.done() and len(queue.trajectories) == 1
        assert player.shares == [config.queue.batch_size / 4], "four actors sample, and one was configured"
        rewards.allowed.set()
        await asyncio.sleep(1.0)
        running.cancel()
        return queue

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        queue = runner.run(story())
    first, last = queue.trajectories
    assert [(one.finish, one.prefix, one.num_tokens, one.identity.segment) for one in queue.trajectories] == [
        ("cut", 0, 4, 0),
        ("stop", 4, 1, 1),
    ]
    assert (first.reward, last.reward) == (0.0, 1.0)
    # What is kept is of version 7, and is younger than the flow's lag of 3 up to a cut for version 9.
    assert list(dict.fromkeys(queue.cut_for)) == [7, 8, 9, 10], "each swap is told of, once"
    assert queue.cut_for.index(10) > queue.cut_for.index(9) + 1, "10 is told of when nothing is kept any more"


# --- calls to the queue ----------------------------------------------------------------------------------------


class Staggered(Player):
    """Says 2 to prompt n after n milliseconds."""

    async def play(self, prompt: Prompt, sampling: Any, cutter: Any = None) -> Episode:
        await asyncio.sleep(int(prompt.text) / 1000)
        return await super().play(prompt, sampling, cutter)


class Timed(Tickets):
    """Notes the time and the size of each delivery."""

    deliveries: list[tuple[float, int]]

    async def _deliver(self, actor: str, cut_for: int, trajectories: bytes, failures: bytes, **asked: int) -> bytes:
        before = len(self.trajectories)
        answer = await super()._deliver(actor, cut_for, trajectories, failures, **asked)
        self.deliveries.append((asyncio.get_running_loop().time(), len(self.trajectories) - before))
        return answer


def test_trajectories_that_finish_one_soon_after_another_share_a_delivery_and_wait_no_longer(
    math_config: Callable[..., Config],
) -> None:
    async def story() -> Timed:
        worker, _ = working(math_config(), *map(str, range(100)))
        queue: Any = Timed(100)
        queue.deliveries = []
        worker._queue, worker._player = queue, Staggered()  # pyright: ignore[reportAttributeAccessIssue]
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(1.0)
        running.cancel()
        return queue

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        queue = runner.run(story())
    assert sum(size for _, size in queue.deliveries) == 100
    assert len(queue.deliveries) <= 0.1 / GATHER_S + 2
    assert len(queue.asked) <= 0.1 / GATHER_S + 3
    # The last one ends 99 ms after the tickets, which came after the first moment of gathering.
    assert queue.deliveries[-1][0] <= 0.1 + 3 * GATHER_S


class Plenty(Tickets):
    """A queue with a ticket for each request, until all are given out."""

    def __init__(self, prompts: int) -> None:
        super().__init__(prompts)
        self.calls: dict[int, list[Ticket]] = {}

    def _given(self, limit: int, call: int) -> bytes:
        """The same call gets the same tickets again."""
        if limit and self.tickets and call not in self.calls:
            self.calls[call], self.tickets = self.tickets[:limit], self.tickets[limit:]
        return encode(tuple(self.calls.get(call, ())) if limit else ())

    async def _issue(self, actor: str, version: int, room: int, call: int) -> bytes:
        self.asked.append((room, call))
        if not self.tickets:
            await asyncio.Event().wait()
        return self._given(room, call)

    async def _deliver(
        self, actor: str, cut_for: int, trajectories: bytes, failures: bytes, *, limit: int, call: int = 0, **asked: int
    ) -> bytes:
        await super()._deliver(actor, cut_for, trajectories, failures, limit=limit)
        return self._given(limit, call)


def test_a_delivery_brings_the_next_tickets_and_the_queue_is_asked_for_others_only_where_they_are_too_few(
    math_config: Callable[..., Config],
) -> None:
    async def story() -> Plenty:
        worker, _ = working(math_config("rollout.in_flight=8"), *["3"] * 100)
        queue: Any = Plenty(100)
        worker._queue, worker._player = queue, Staggered()  # pyright: ignore[reportAttributeAccessIssue]
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(3.0)
        running.cancel()
        return queue

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        queue = runner.run(story())
    assert sorted(one.identity.prompt for one in queue.trajectories) == list(range(100)), "each once"
    assert queue.limits == [8] * 12 + [0], "each delivery asks for as many as have ended, but for the last"
    assert queue.asked == [(8, 0), (8, 13)], "at the start, and when a delivery brought four for eight places"
