"""Segments of an SGLang that streams: at any moment a cut loses, doubles and rejuvenates no token."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY
from fake_sglang import Fake, Streaming, candidates, logprob, opened, pushed, run, token

from streamppo.config.sections import Config
from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.endpoint import stop_strings
from streamppo.rollout.engine import Completion, Cuts, Sampling
from streamppo.rollout.episode import Columns
from streamppo.rollout.segment_writer import SegmentWriter
from streamppo.rollout.sglang.engine import SGLangEngine
from streamppo.rollout.sglang.stream import INTERVAL
from streamppo.tasks.environments import Done
from streamppo.types import Identity, Reward, Ticket, Trajectory

AGENTS = REPOSITORY / "examples" / "calculator_agent.toml"

PROMPT = np.array([3, 4], np.int32)
ALWAYS = {"max_age": 1, "share": 0.0}
Task = asyncio.Task[Completion]


def begun(engine: SGLangEngine, sampling: Sampling, **cuts: Any) -> tuple[Task, list[Completion]]:
    """A running completion, and its handed-over tokens."""
    handed: list[Completion] = []
    return asyncio.ensure_future(engine.generate(PROMPT, sampling, Cuts(handed.append, **cuts))), handed


def check(fake: Streaming, name: int, handed: list[Completion], whole: Completion) -> None:
    """Nothing of request `name` is lost, doubled, out of order or too young."""
    one, count = fake.all[name], len(whole.tokens)
    assert count == one.limit
    lengths = [len(part.tokens) for part in handed]
    assert lengths == sorted(set(lengths)) and max(lengths, default=0) < count
    for part in [*handed, whole]:
        places = range(len(part.tokens))
        assert part.tokens.tolist() == [token(name, n) for n in places]
        assert part.logprobs.tolist() == [logprob(n) * (2 if one.candidates else 1) for n in places]
        assert (part.versions <= one.truth[: len(part.tokens)]).all()
        if one.candidates:
            assert part.candidates is not None
            assert part.candidates.tokens.tolist() == [more for n in places for more in candidates(name, n)]
            assert part.candidates.counts.tolist() == [n % 3 + 1 for n in places]
        else:
            assert part.candidates is None
    assert {part.finish for part in handed} <= {"cut"} and whole.finish == "length"


async def swapped(fake: Streaming, engine: SGLangEngine, version: int) -> None:
    """Swap to `version`, and step on until that has come to its end.

    No step is made before SGLang holds it: a thread copies the weights first, and may take as long as completions last.
    """
    swap = asyncio.ensure_future(engine.update_weights(version, pushed(float(version))))
    await fake.took(version)
    await fake.ended(swap)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(16))
def test_cuts_at_any_moment_lose_and_double_no_token_and_none_is_too_young(seed: int) -> None:
    drawn = random.Random(seed)

    async def case() -> None:
        fake = Streaming(repeats=drawn.random() < 0.3)
        engine = await opened(fake, kv=drawn.choice(["keep", "recompute"]))
        max_age, mosts = drawn.choice([1, 2, 3]), list[int]()
        made: list[tuple[Task, list[Completion]]] = []
        for version in range(6, 12):
            for _ in range(drawn.randrange(4)):
                sampling = Sampling(drawn.randrange(1, 200), top_k=drawn.choice([0, 3]))
                mosts.append(drawn.choice([0, 1, 7, 20]))
                made.append(begun(engine, sampling, max_tokens=mosts[-1], max_age=max_age))
                await fake.step(drawn.randrange(30))
            cut = {task: len(handed) for task, handed in made if not task.done()}
            await swapped(fake, engine, version)
            for task, handed in made:
                if not task.done() and cut.get(task) != len(handed):
                    assert (handed[-1].versions < version).any()
            await fake.step(drawn.randrange(60))
        wholes = await fake.ended(asyncio.gather(*(task for task, _ in made)))
        for name, ((_, handed), whole) in enumerate(zip(made, wholes, strict=True)):
            check(fake, name, handed, whole)
            ends = [0, *(len(part.tokens) for part in handed), len(whole.tokens)]
            assert max(np.diff(ends)) <= (mosts[name] or len(whole.tokens))
        assert engine.usage().tokens == sum(len(whole.tokens) for whole in wholes)
        await engine.stop()

    run(case())


@pytest.mark.parametrize("steps", range(16, 16 + 2 * INTERVAL))
def test_a_swap_ends_when_all_tokens_that_older_weights_can_have_sampled_were_handed_over(steps: int) -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(100), **ALWAYS)
        await fake.step(steps)
        (one,) = fake.all
        assert len(one.truth) == one.counted + 1 == steps
        sent = one.sent
        swap = asyncio.ensure_future(engine.update_weights(6, pushed(2.0)))
        await fake.took(6)
        for _ in range(INTERVAL - 1 - (one.counted - sent)):
            await fake.step(1)
            assert (swap.done(), engine.version, handed) == (False, 5, [])
        await fake.step(2)
        await swap
        assert engine.version == 6
        (segment,) = handed
        assert len(segment.tokens) == sent + INTERVAL >= steps
        assert set(segment.versions) == {5}
        whole = await fake.ended(task)
        # The token of the step under way is of the old version, though SGLang says of the new one.
        assert one.truth.count(5) == steps
        assert whole.versions.tolist() == one.truth
        await engine.stop()

    run(case())


@pytest.mark.parametrize("arrived", [0, 1, 10])
@pytest.mark.parametrize("late", [1, 8, 9, 30])
def test_tokens_that_a_pause_overtakes_are_of_the_version_before(late: int, arrived: int) -> None:
    async def case() -> None:
        fake = Streaming()
        fake.is_ordered = False
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(100), max_tokens=5)
        await fake.step(arrived)
        fake.lags = True
        await fake.step(late)
        await swapped(fake, engine, 6)
        check(fake, 0, handed, await fake.ended(task))
        await engine.stop()

    run(case())


def test_behind_a_cut_all_tokens_are_of_the_new_version() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        tasks = [begun(engine, Sampling(400), **ALWAYS) for _ in range(5)]
        for version in (6, 7, 8):
            await fake.step(50 + version)
            await swapped(fake, engine, version)
            for _, handed in tasks:
                assert (set(handed[-1].versions), len(handed)) == ({*range(5, version)}, version - 5)
        for name, (task, handed) in enumerate(tasks):
            whole = await fake.ended(task)
            check(fake, name, handed, whole)
            for part, version in zip(handed, (6, 7, 8), strict=True):
                assert (whole.versions[len(part.tokens) :] >= version).all()
        await engine.stop()

    run(case())


def test_segments_of_a_length_have_it_whatever_comes_at_a_time() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(50), max_tokens=5)
        whole = await fake.ended(task)
        assert [len(part.tokens) for part in handed] == [5, 10, 15, 20, 25, 30, 35, 40, 45]
        check(fake, 0, handed, whole)
        await engine.stop()

    run(case())


def test_tokens_of_an_earlier_turn_are_as_old_as_they_are() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        (_, parts), (_, older) = (
            begun(engine, Sampling(200), max_age=3, share=9.0),
            begun(engine, Sampling(200), max_age=3, share=9.0, oldest=3),
        )
        await fake.step(20)
        await swapped(fake, engine, 6)
        assert (len(parts), len(older)) == (0, 1)
        await engine.stop()

    run(case())


def test_of_those_that_are_not_yet_due_as_many_go_on_as_a_batch_has_room_for() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        tasks = [begun(engine, Sampling(200), max_age=2, share=3.0) for _ in range(5)]
        await fake.step(20)
        await swapped(fake, engine, 6)
        assert [len(handed) for _, handed in tasks] == [1, 1, 0, 0, 0]
        await engine.stop()

    run(case())


def test_nothing_is_handed_over_while_it_is_in_doubt_which_weights_sampled_it() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(300), max_tokens=5)
        await fake.step(20)
        assert len(handed) == 3
        fake.look.clear()
        fake.swallows = True
        swap = asyncio.ensure_future(engine.update_weights(6, pushed(2.0)))
        while engine._certain.is_set():
            await asyncio.sleep(0.001)
        await fake.step(60)
        assert len(handed) == 3 and not task.done()
        fake.look.set()
        with pytest.raises(WeightsError):
            await swap
        with pytest.raises(ModelError, match="SGLang died after a segment that was handed over: it refused version 6"):
            await task
        assert len(handed) == 3
        await engine.stop()

    run(case())


def test_what_has_arrived_in_doubt_is_handed_over_when_that_is_gone() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(300), max_tokens=20)
        fake.look.clear()
        swap = asyncio.ensure_future(engine.update_weights(6, pushed(2.0)))
        while engine._certain.is_set():
            await asyncio.sleep(0.001)
        await fake.step(70)
        assert not handed
        fake.look.set()
        await swap
        assert [len(part.tokens) for part in handed] == [20, 40, 60]
        check(fake, 0, handed, await fake.ended(task))
        await engine.stop()

    run(case())


def test_a_death_before_the_first_cut_samples_again_and_one_behind_it_is_the_end_of_the_attempt() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        (first, nothing), (second, handed) = begun(engine, Sampling(300)), begun(engine, Sampling(300), max_tokens=20)
        await fake.step(30)
        fake.dead = "killed by a test"
        with pytest.raises(ModelError, match="after a segment that was handed over: killed by a test"):
            await second
        while fake.dead:
            await asyncio.sleep(0.001)
        whole = await fake.ended(first)
        assert (fake.lives, nothing, [len(part.tokens) for part in handed]) == ([0, 1], [], [20])
        check(fake, 2, nothing, whole)
        await engine.stop()

    run(case())


@pytest.mark.parametrize("steps", [1, 4, 5, 12, 26])
@pytest.mark.parametrize("dies", [False, True])
def test_a_turn_ends_at_its_stop_string_over_a_swap_and_over_a_death(dies: bool, steps: int) -> None:
    """Its tokens have their versions and count as sampled, its context as reused, and the rest is aborted."""

    async def case() -> None:
        fake = Streaming()
        fake.cached = 1
        engine = await opened(fake)
        turn = asyncio.ensure_future(
            stop_strings.until(
                lambda tokens: tokens[-1] in (29, 1002), partial(engine.generate, PROMPT, Sampling(100, top_k=3))
            )
        )
        await fake.step(steps)
        # No segment is due, so the swap needs no step. More than three would reach the stop string.
        await engine.update_weights(6, pushed(6.0))
        if dies:
            fake.dead = "killed by a test"
            while len(fake.lives) < 2 or fake.dead:
                await asyncio.sleep(0.001)
        completion, again, count = await fake.ended(turn), int(dies), 3 if dies else 30
        assert completion.tokens.tolist() == [token(again, place) for place in range(count)]
        assert (completion.finish, completion.cached) == ("stop", 1)
        truth = fake.all[again].truth
        assert (completion.versions <= truth[:count]).all() and completion.versions[-1] == truth[
            max(0, count - 1 - INTERVAL)
        ]
        assert completion.candidates is not None and len(completion.candidates.counts) == count
        assert len(fake.aborted) == 1 and not fake.requests
        usage, sent = engine.usage(), [one.sent for one in fake.all if one.sent]
        assert (usage.tokens, usage.prompted, usage.reused) == (sum(sent), 2 * len(sent), len(sent))
        await engine.stop()

    run(case())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"finish": {"type": "abort", "message": "no room"}}, "gave up a completion: no room"),
        ({"break_off": True}, "its stream broke off"),
    ],
)
def test_a_stream_that_comes_to_nothing_is_an_error(fault: dict[str, Any], message: str) -> None:
    async def case() -> None:
        fake = Streaming()
        for name, value in fault.items():
            setattr(fake, name, value)
        engine = await opened(fake)
        task, _ = begun(engine, Sampling(40), max_tokens=10)
        with pytest.raises(ModelError, match=message):
            await fake.ended(task)
        assert engine.usage().restarts == 0
        await engine.stop()

    run(case())


def test_an_sglang_that_keeps_more_tokens_back_than_it_was_asked_to_is_found_out() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(300), **ALWAYS)
        await fake.step(1)
        fake.all[0].interval = 10 * INTERVAL
        await fake.step(130)
        await swapped(fake, engine, 6)
        assert len(handed) == 1
        with pytest.raises(ModelError, match=r"SGLang reports versions .* handed over with versions"):
            await swapped(fake, engine, 7)
            await fake.ended(task)
        await engine.stop()

    run(case())


def test_a_completion_that_nobody_waits_for_keeps_no_swap_waiting_and_hands_over_nothing_more() -> None:
    async def case() -> None:
        fake = Streaming()
        engine = await opened(fake)
        task, handed = begun(engine, Sampling(300), **ALWAYS)
        await fake.step(20)
        swap = asyncio.ensure_future(engine.update_weights(6, pushed(2.0)))
        await fake.took(6)
        await asyncio.sleep(0.01)
        assert not swap.done()
        task.cancel()
        await swap
        assert (engine.version, handed, len(fake.aborted), fake.requests) == (6, [], 1, [])
        await engine.stop()

    run(case())


def test_without_cuts_nothing_is_streamed() -> None:
    async def case() -> None:
        engine = await opened(Fake())
        assert (await engine.generate(PROMPT, Sampling(1))).tokens.tolist() == [7]
        await engine.stop()

    run(case())


def test_the_segments_of_two_turns_put_together_are_all_that_was_sampled(math_config: Callable[..., Config]) -> None:
    config = math_config(
        *("queue.segments={max_tokens = 30}", "queue.max_lag=2", "queue.batch_size=32", "rollout.actors=2")
    )
    ticket = Ticket(identity=Identity(task="t", prompt=4, sample=1, attempt=0), slot=9)

    async def case() -> None:
        fake, handed = Streaming(), list[Trajectory]()
        engine = await opened(fake, vocabulary=10**6)
        handing, columns = SegmentWriter(ticket, "a", config, handed.append, share=4.0), Columns(PROMPT)
        for turn in (0, 1):
            cuts = handing.cuts(columns.cut, columns.versions())
            playing = asyncio.ensure_future(engine.generate(columns.context(), Sampling(100), cuts))
            await fake.step(50)
            await swapped(fake, engine, 6 + turn)
            columns.add_turn(await fake.ended(playing), "")
            columns.rewards.append(1.0)
            if not turn:
                columns.add_observation(np.array([7, 7], np.int32))
        episode = columns.episode("stop", Done())
        last = episode.trajectory(handing.identity, "a", episode.reward(Reward()), prefix=handing.prefix)
        whole = episode.trajectory(ticket.identity, "a", episode.reward(Reward()))
        parts = [*handed, last]
        assert [part.identity.segment for part in parts] == list(range(len(parts))) and len(parts) >= 6
        for name in ("tokens", "logprobs", "mask"):
            assert b"".join(getattr(part, name) for part in parts) == getattr(whole, name), name
        handed_versions = np.frombuffer(b"".join(part.versions for part in parts), np.int32)
        assert (handed_versions <= episode.versions).all()
        await engine.stop()

    run(case())
