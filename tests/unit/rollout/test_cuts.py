"""Segments of running completions: due ones, and the tokens that are handed over."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from streamppo.config.sections import Config
from streamppo.rollout.engine import Completion, Cuts, TokenCandidates
from streamppo.rollout.episode import Columns, one_turn
from streamppo.rollout.segment_cuts import cut_for, due, max_in_flight, segments_to_cut
from streamppo.rollout.segment_writer import SegmentWriter
from streamppo.tasks.environments import Done
from streamppo.types import Identity, Reward, Ticket, Trajectory, floats

TICKET = Ticket(identity=Identity(task="t", prompt=4, sample=1, attempt=2), slot=9)
SEGMENTS = ("queue.segments={max_tokens = 2}", "queue.max_lag=4", "rollout.actors=2", "queue.batch_size=32")


@pytest.mark.parametrize(
    ("ages", "max_age", "share", "cut"),
    [
        ([0, 1, 2, 3, 4], 3, 9.0, {3, 4}),
        ([1, 1, 0, 1], 1, 9.0, {0, 1, 3}),
        ([1, 1, 1, 1, 1], 3, 2.0, {0}),
        ([2, 1, 1, 1, 1], 3, 2.0, {0}),
        ([2, 2, 2, 2, 1], 3, 2.0, {0, 1}),
        ([0, 0, 0], 3, 0.5, set()),
        ([], 3, 1.0, set()),
    ],
)
def test_the_oldest_are_cut_and_no_more_go_on_than_can_be_trained_on_in_time(
    ages: list[int], max_age: int, share: float, cut: set[int]
) -> None:
    found = due(ages, max_age, share)
    assert len(found) == len(set(found))
    for age in range(1, max_age + 1):
        going_on = [one for place, one in enumerate(ages) if one >= age and place not in found]
        assert len(going_on) <= (max_age - age) * share
    assert set(found) == cut


@pytest.mark.parametrize(
    ("ages", "aim", "cut"),
    [
        ([0, 1, 2, 3, 3], 2, {3, 4}),
        ([0, 0, 1, 2], 2, {3}),
        ([0, 0, 1, 2], 0, set()),
        ([9, 9, 9, 5], 2, {0, 1, 2}),
    ],
)
def test_those_older_than_wanted_are_cut_as_far_as_a_batch_has_room(ages: list[int], aim: int, cut: set[int]) -> None:
    assert set(due(ages, 9, 2.0, aim)) == cut
    assert set(due(ages, 9, 2.0)) <= cut
    cuts = Cuts(list[Completion]().append, max_age=9, share=2.0, aim=lambda: aim)
    assert set(segments_to_cut(12, [(cuts, 12 - age) for age in ages])) == cut


@pytest.mark.parametrize(("max_age", "share"), [(1, 4.0), (2, 4.0), (2, 2.5), (7, 2.0)])
def test_with_as_many_under_way_as_may_be_a_swap_never_cuts_more_than_a_batch_has_room_for(
    max_age: int, share: float
) -> None:
    draw = random.Random(1)
    ages = [0] * max_in_flight(max_age, share)
    for _ in range(200):
        aim = draw.randint(0, max_age)
        found = due([age + 1 for age in ages], max_age, share, aim)
        assert len(found) <= math.ceil(share)
        # The rest of a completion begins anew, and so does the one that takes the place of one that has ended.
        ages = [0 if place in found or draw.random() < 0.1 else age + 1 for place, age in enumerate(ages)]


def completion(count: int, finish: str = "cut") -> Completion:
    """The first tokens of one and the same completion: 10, 11, ...; two of each version; n + 1 candidates each."""
    tokens = np.arange(10, 10 + count, dtype=np.int32)
    candidates = np.concatenate([np.arange(10, 11 + n) for n in range(count)]).astype(np.int32)
    return Completion(
        tokens,
        -np.arange(count, dtype=np.float32),
        np.arange(count, dtype=np.int32) // 2,
        finish,  # pyright: ignore[reportArgumentType]
        candidates=TokenCandidates(candidates, np.arange(1, count + 1, dtype=np.int32)),
    )


def test_segments_of_several_turns_put_together_are_the_whole_and_its_rewards(
    math_config: Callable[..., Config],
) -> None:
    handed: list[Trajectory] = []
    handing = SegmentWriter(TICKET, "a", math_config(*SEGMENTS), handed.append, share=2.0)
    columns = Columns(np.array([1, 2, 3], np.int32))
    first = handing.cuts(columns.cut, columns.versions())
    assert first and (first.max_tokens, first.max_age, first.share, first.oldest) == (2, 2, 2.0, None)
    first.take(completion(2))
    columns.add_turn(completion(3, "stop"), "abc")
    columns.add_observation(np.array([7, 7], np.int32))
    second = handing.cuts(columns.cut, columns.versions())
    assert second and second.oldest == 1, "the third token of the first turn was not handed over"
    second.take(completion(2))
    columns.add_turn(completion(4, "stop"), "abcd")
    columns.rewards += [1.0, 2.0]
    episode = columns.episode("stop", Done())
    reward = episode.reward(Reward(score=4.0))
    whole = episode.trajectory(TICKET.identity, "a", reward)
    last = episode.trajectory(handing.identity, "a", reward, prefix=handing.prefix)
    segments = [*handed, last]
    assert [one.identity.segment for one in segments] == [0, 1, 2]
    assert [one.finish for one in segments] == ["cut", "cut", "stop"]
    assert [one.prefix for one in segments] == [0, 2, 7]
    for name in ("tokens", "logprobs", "versions", "mask", "candidates", "candidate_counts"):
        assert b"".join(getattr(one, name) for one in segments) == getattr(whole, name), name
    for one in segments:
        assert one.prompt_tokens == whole.prompt_tokens + whole.tokens[: 4 * one.prefix]
    assert [one.reward for one in segments] == [0.0, 0.0, 7.0]
    # The reward of the first turn stands on the first token behind the handed-over ones.
    assert floats(last.token_rewards).tolist() == [1.0, 6.0]
    assert floats(whole.token_rewards).sum() == 7.0


def test_an_environment_is_waited_for_with_the_tokens_of_the_newest_version_alone(
    math_config: Callable[..., Config],
) -> None:
    handed: list[Trajectory] = []
    handing = SegmentWriter(TICKET, "a", math_config(*SEGMENTS), handed.append, share=2.0)
    assert handing.cut_waiting(9) is None, "nothing waits"
    columns = Columns(np.array([1, 2, 3], np.int32))
    columns.add_turn(completion(6, "stop"), "abcdef")
    handing.wait(columns.episode("cut", Done()))
    # max_lag 4 aims at a lag of 3, and cuts at 2. The versions are 0, 0, 1, 1, 2, 2.
    assert (handing.cut_waiting(1), len(handed)) == (0, 0), "not due yet"
    assert (handing.cut_waiting(2), len(handed)) == (2, 1)
    assert (handing.cut_waiting(9), len(handed)) == (2, 1), "no version beside the newest is left"
    columns.add_observation(np.array([7], np.int32))
    cuts = handing.cuts(columns.cut, columns.versions())
    assert cuts and cuts.oldest == 2 and handing.cut_waiting(9) is None, "the policy has its turn"
    columns.add_turn(completion(3, "stop"), "abc")
    episode = columns.episode("stop", Done())
    whole = episode.trajectory(TICKET.identity, "a", Reward(score=1.0))
    last = episode.trajectory(handing.identity, "a", Reward(score=1.0), prefix=handing.prefix)
    for name in ("tokens", "logprobs", "versions", "mask", "candidates", "candidate_counts"):
        assert b"".join(getattr(one, name) for one in (*handed, last)) == getattr(whole, name), name
    assert [(one.finish, one.prefix, one.identity.segment) for one in (*handed, last)] == [
        ("cut", 0, 0),
        ("stop", 4, 1),
    ]


def test_an_engine_is_behind_the_oldest_that_it_keeps() -> None:
    assert cut_for(9, [], 3) == 9
    assert cut_for(9, [9, 8, 7], 3) == 9
    assert cut_for(9, [9, 5, 7], 3) == 7


def test_without_segments_nothing_is_cut(math_config: Callable[..., Config]) -> None:
    handing = SegmentWriter(TICKET, "a", math_config(), list[Trajectory]().append, share=2.0)
    assert handing.cuts(lambda sampled: pytest.fail("cut"), np.zeros(0, np.int32)) is None
    handing.wait(one_turn(np.zeros(1, np.int32), completion(4)))
    assert handing.cut_waiting(99) is None
    assert (handing.identity, handing.prefix) == (TICKET.identity, 0)
