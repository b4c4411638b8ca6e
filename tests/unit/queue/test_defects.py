"""Candidates, and a teacher's log-probs, that cannot be trained under make a dead letter."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from conftest import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.queue.rules.validation import TokenLimits, defect, defects
from streamppo.types import Trajectory

CUT = np.array([5, 7, 5, 6, 7], np.int32), np.array([2, 0, 3], np.int32)
"""Candidates of three tokens, 5, 6 and 7."""


@pytest.mark.parametrize(
    ("candidates", "counts", "reason"),
    [
        (*CUT, None),
        ([5], [1, 0, 0], None),
        ([], [0, 0, 0], None),
        ([5, 7], [2, 0], "counts of 8 bytes"),
        ([5, 7], [], "counts of 0 bytes"),
        ([5, 7], [2, 1, 0], "2 candidates, and counts that add up to 3"),
        ([5, 7], [3, 0, -1], "2 candidates, and counts that add up to 2"),
        ([7, 5], [2, 0, 0], "not in rising order"),
        ([5, 5], [2, 0, 0], "not in rising order"),
        ([6, 7], [2, 0, 0], "token 0 is none of its 2 candidates"),
        ([5, 5, 6], [1, 0, 2], "token 2 is none of its 2 candidates"),
    ],
)
def test_candidates_that_no_token_can_have_been_drawn_from_are_a_defect(
    candidates: Sequence[int], counts: Sequence[int], reason: str | None
) -> None:
    columns = {"candidates": np.int32(candidates).tobytes(), "candidate_counts": np.int32(counts).tobytes()}
    found = defect(msgspec.structs.replace(trajectory([5, 6, 7]), **columns), TokenLimits(17, 5, None, candidates=True))
    assert (found is None) if reason is None else (reason in str(found))


def test_a_trajectory_that_was_cut_says_from_which_candidates_and_these_are_the_models() -> None:
    cut = TokenLimits(17, 5, None, candidates=True)
    assert "without its candidates" in str(defect(trajectory([5]), cut))
    assert defect(trajectory([5]), cut._replace(candidates=False)) is None
    strange = {"candidates": np.int32([5, 17]).tobytes(), "candidate_counts": np.int32([2]).tobytes()}
    assert defect(msgspec.structs.replace(trajectory([5]), **strange), cut) == (
        "token 17 of the candidates is not one of the model's 17 tokens"
    )
    masked = msgspec.structs.replace(trajectory([5, 6], mask=[False, True]), **strange)
    assert "counts of 4 bytes" in str(defect(masked, cut))


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([-0.5, -1.0, -2.0], None),
        ([-0.5, 0.0, -2.0], None),
        ([-0.5, np.nan, -2.0], None),
        ([-0.5, -1.0], "log-probs of the teacher of 8 bytes for tokens of 12 bytes"),
        ([-0.5, -1.0, -2.0, -3.0], "log-probs of the teacher of 16 bytes for tokens of 12 bytes"),
        ([np.nan, 0.0, -2.0], "a log-prob of the teacher is not finite"),
        ([-0.5, 0.0, -np.inf], "a log-prob of the teacher is not finite"),
        ([-0.5, 0.0, 0.25], "a log-prob of the teacher is positive: 0.25"),
        ([], "it has no log-probs of the teacher at algorithm.teacher.url"),
    ],
)
def test_log_probs_of_a_teacher_are_numbers_for_every_token_that_the_policy_sampled(
    logprobs: Sequence[float], reason: str | None
) -> None:
    one = trajectory([5, 6, 7], mask=[True, False, True])
    one = msgspec.structs.replace(one, teacher_logprobs=np.float32(logprobs).tobytes())
    assert defect(one, TokenLimits(17, 5, None, teacher=True)) == reason
    assert defect(one, TokenLimits(17, 5, None)) == (reason if logprobs else None)


# --- a whole delivery ----------------------------------------------------------------------------------------

DAMAGE: dict[str, object] = {
    "tokens": np.array([5, 16], np.int32).tobytes(),
    "logprobs": np.float32([-1.0, np.nan]).tobytes(),
    "versions": b"",
    "mask": bytes([1, 2]),
    "prompt_tokens": bytes(3),
    "reward": float("inf"),
    "token_rewards": np.float32([0.5, 0.5]).tobytes(),
    "candidate_counts": np.int32([0, 0]).tobytes(),
    "teacher_logprobs": np.float32([-1.0, np.inf]).tobytes(),
    "routes": np.int16([0, 1, -1, -1]).tobytes(),
    "components": {"right": 1.0},
}
"""Columns for a trajectory of two tokens, some of them wrong, some only unusual."""
MORE = {
    "tokens": [np.array([5, -1], np.int32).tobytes(), np.array([5, 17], np.int32).tobytes(), b"", bytes(12)],
    "logprobs": [np.float32([-1.0, 0.1]).tobytes(), np.float32([-np.inf, -1.0]).tobytes(), bytes(4)],
    "mask": [bytes([0, 0]), bytes([0, 1]), bytes(3)],
    "prompt_tokens": [b"", np.array([16, 20], np.int32).tobytes(), bytes(16), np.array([-4], np.int32).tobytes()],
    "reward": [float("nan"), 2.0],
    "routes": [np.int16([0, -2, 1, 1]).tobytes(), bytes(7)],
}
CHANGES = [{name: value} for name, values in DAMAGE.items() for value in [values, *MORE.get(name, [])]]
LIMITS = [
    None,
    TokenLimits(17, 5, None),
    TokenLimits(17, 1, 3),
    TokenLimits(17, 5, 2),
    TokenLimits(17, 5, None, candidates=True),
    TokenLimits(17, 5, None, components=frozenset({"right"})),
    TokenLimits(17, 5, None, teacher=True),
    TokenLimits(17, 5, None, routes=True),
]


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ([[0, 1], [1, 0], [-1, -1], [300, 2]], None),
        ([[0, 1], [1, 0], [2, 1]], "routes of 12 bytes for 4 tokens"),
        ([[0, 1], [1, 0], [2, 1], [-2, 1]], "a route to expert -2"),
        ([], "it has no routes of a mixture of experts, and rollout.engine.routes requires them"),
    ],
)
def test_routes_have_experts_for_every_token_but_the_last(routes: list[list[int]], reason: str | None) -> None:
    made = msgspec.structs.replace(trajectory([5, 6], prompt=(3, 4, 5)), routes=np.array(routes, np.int16).tobytes())
    assert defect(made, TokenLimits(17, 5, None, routes=True)) == reason


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([{}, {}, {}, *CHANGES]), max_size=4), st.sampled_from(LIMITS))
def test_a_delivery_is_judged_as_each_of_its_trajectories_is(
    changes: list[dict[str, object]], limits: TokenLimits | None
) -> None:
    sound: Trajectory = trajectory([5, 6])
    delivery = [msgspec.structs.replace(sound, **change) for change in changes]
    assert defects(delivery, limits) == [defect(one, limits) for one in delivery]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_one_bad_trajectory_among_good_ones_is_named(change: dict[str, object]) -> None:
    sound: Trajectory = trajectory([5, 6])
    limits = TokenLimits(17, 5, 3)
    bad = msgspec.structs.replace(sound, **change)
    assert defects([sound, bad, sound], limits) == [None, defect(bad, limits), None]
