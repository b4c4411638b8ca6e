"""Validates delivered trajectories: an unusable trajectory becomes a dead letter, with the reason."""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from streamppo.types import Trajectory, branches, flags, floats, ints, routes, turns

OPTIONAL_COLUMNS = attrgetter(
    "token_rewards", "candidates", "candidate_counts", "teacher_logprobs", "routes", "branches", "turns"
)
LOGPROB_SLACK = 1e-4
"""A log-prob up to this much above 0 counts as a rounding error."""


class TokenLimits(NamedTuple):
    """The size of the vocabulary, and the maximum of tokens in a completion and in a prompt (None: any number).

    The other fields say what a trajectory must have. `candidates`: the candidate tokens of top-p or top-k.
    `components`: the reward components by which samples are compared. `teacher`: log-probs from the teacher's server.
    `routes`: the engine's expert choices. `linear` names configured features that do not support branches.
    """

    vocabulary: int
    completion: int
    prompt: int | None
    candidates: bool = False
    components: frozenset[str] = frozenset()
    teacher: bool = False
    routes: bool = False
    linear: tuple[str, ...] = ()


def defects(trajectories: Sequence[Trajectory], limits: TokenLimits | None) -> list[str | None]:
    """Return `defect` of each trajectory. One check over all columns is enough if all trajectories are valid."""
    if trajectories and all(map(_is_even, trajectories)) and _are_sound(trajectories, limits):
        return [None] * len(trajectories)
    return [defect(trajectory, limits) for trajectory in trajectories]


def _is_even(trajectory: Trajectory) -> bool:
    """True if all columns have the same number of tokens and there are no optional columns."""
    size, prompt = len(trajectory.tokens), len(trajectory.prompt_tokens)
    same = size == len(trajectory.logprobs) == len(trajectory.versions) == 4 * len(trajectory.mask) > 0
    return same and prompt > 0 and prompt % 4 == 0 and not any(OPTIONAL_COLUMNS(trajectory))


def _are_sound(trajectories: Sequence[Trajectory], limits: TokenLimits | None) -> bool:
    """True if `defect` accepts all these `_is_even` trajectories. If false, each must be checked by `defect`."""
    marks = b"".join(trajectory.mask for trajectory in trajectories)
    if max(marks) > 1 or not all(b"\1" in trajectory.mask for trajectory in trajectories):
        return False
    logprobs = floats(b"".join(trajectory.logprobs for trajectory in trajectories))[flags(marks)]
    # The comparison is written so that NaN fails it.
    if not (logprobs.min() > -np.inf and logprobs.max() <= LOGPROB_SLACK):
        return False
    if not all(math.isfinite(trajectory.reward) for trajectory in trajectories):
        return False
    if limits is None:
        return True
    if (
        limits.candidates
        or limits.components
        or limits.teacher
        or limits.routes
        or max(trajectory.prefix + trajectory.num_tokens for trajectory in trajectories) > limits.completion
    ):
        return False
    longest = max(len(trajectory.prompt_tokens) - 4 * trajectory.prefix for trajectory in trajectories)
    if limits.prompt is not None and longest > 4 * limits.prompt:
        return False
    tokens = ints(b"".join(trajectory.prompt_tokens + trajectory.tokens for trajectory in trajectories))
    return bool(tokens.min() >= 0 and tokens.max() < limits.vocabulary)


def defect(trajectory: Trajectory, limits: TokenLimits | None) -> str | None:
    """The reason why a trajectory cannot be trained on, or None."""
    reason = _shape(trajectory) or _numbers(trajectory) or _teacher(trajectory) or _candidates(trajectory)
    reason = reason or _routes(trajectory) or _branches(trajectory)
    return reason or (limits and _beyond(trajectory, limits))


def _shape(trajectory: Trajectory) -> str | None:
    lengths = {
        "tokens": len(trajectory.tokens) / 4,
        "log-probs": len(trajectory.logprobs) / 4,
        "versions": len(trajectory.versions) / 4,
        "mask": float(len(trajectory.mask)),
    }
    if len(set(lengths.values())) != 1 or not trajectory.tokens or len(trajectory.tokens) % 4:
        return "columns of different lengths, or empty: " + ", ".join(
            f"{count:g} {name}" for name, count in lengths.items()
        )
    if not trajectory.prompt_tokens or len(trajectory.prompt_tokens) % 4:
        return f"a prompt of {len(trajectory.prompt_tokens)} bytes"
    if trajectory.token_rewards and len(trajectory.token_rewards) != len(trajectory.tokens):
        return f"token rewards of {len(trajectory.token_rewards)} bytes for tokens of {len(trajectory.tokens)} bytes"
    if max(trajectory.mask) > 1:
        return f"the mask has {max(trajectory.mask)}, which is neither 0 nor 1"
    if not any(trajectory.mask):
        return "no token was sampled by the policy"
    return None


def _numbers(trajectory: Trajectory) -> str | None:
    logprobs = floats(trajectory.logprobs)[flags(trajectory.mask)]
    if not np.isfinite(logprobs).all():
        return "a log-prob is not finite"
    if (logprobs > LOGPROB_SLACK).any():
        return f"a log-prob is positive: {logprobs.max():g}"
    if not np.isfinite(trajectory.reward) or not np.isfinite(floats(trajectory.token_rewards)).all():
        return f"the reward is {trajectory.reward}"
    return None


def _teacher(trajectory: Trajectory) -> str | None:
    column = trajectory.teacher_logprobs
    if not column:
        return None
    if len(column) != len(trajectory.tokens):
        return f"log-probs of the teacher of {len(column)} bytes for tokens of {len(trajectory.tokens)} bytes"
    logprobs = floats(column)[flags(trajectory.mask)]
    if not np.isfinite(logprobs).all():
        return "a log-prob of the teacher is not finite"
    return f"a log-prob of the teacher is positive: {logprobs.max():g}" if logprobs.max() > LOGPROB_SLACK else None


def _candidates(trajectory: Trajectory) -> str | None:
    if not trajectory.candidate_counts and not trajectory.candidates:
        return None
    if len(trajectory.candidate_counts) != len(trajectory.tokens) or len(trajectory.candidates) % 4:
        return f"candidates of {len(trajectory.candidates)} and counts of {len(trajectory.candidate_counts)} bytes"
    counts, candidates = ints(trajectory.candidate_counts), ints(trajectory.candidates)
    if (counts < 0).any() or counts.sum() != len(candidates):
        return f"{len(candidates)} candidates, and counts that add up to {counts.sum()}"
    token = np.repeat(np.arange(len(counts)), counts)
    if ((np.diff(candidates) <= 0) & (np.diff(token) == 0)).any():
        return "the candidates of a token are not in rising order"
    is_found = np.bincount(token[candidates == ints(trajectory.tokens)[token]], minlength=len(counts)) > 0
    if (is_missing := flags(trajectory.mask) & (counts > 0) & ~is_found).any():
        return f"token {int(np.argmax(is_missing))} is none of its {counts[np.argmax(is_missing)]} candidates"
    return None


def _routes(trajectory: Trajectory) -> str | None:
    tokens = (len(trajectory.prompt_tokens) + len(trajectory.tokens)) // 4 - 1
    return routes.flaw(trajectory.routes, trajectory.route_bytes, tokens)


def _branches(trajectory: Trajectory) -> str | None:
    if not trajectory.branches and not trajectory.turns:
        return None
    if trajectory.finish == "cut" or trajectory.identity.segment or trajectory.prefix:
        return "branches in a segment of a completion"
    prompt, mask = len(trajectory.prompt_tokens) // 4, flags(trajectory.mask)
    flaw = branches.flaw(trajectory.branches, prompt, mask) if trajectory.branches else None
    return flaw or (turns.flaw(trajectory.turns, prompt, mask) if trajectory.turns else None)


def _beyond(trajectory: Trajectory, limits: TokenLimits) -> str | None:
    if limits.candidates and not trajectory.candidate_counts:
        return "sampled with top-p or top-k, without its candidates"
    if limits.teacher and not trajectory.teacher_logprobs:
        return "it has no log-probs of the teacher at algorithm.teacher.url"
    if limits.routes and not trajectory.routes:
        return "it has no routes of a mixture of experts, and rollout.engine.routes requires them"
    if limits.linear and trajectory.branches:
        return f"its tokens have branches, which {limits.linear[0]} does not support"
    if lacking := sorted(limits.components - trajectory.components.keys()):
        components = ", ".join(trajectory.components) or "none"
        return f"samples are compared by {lacking[0]!r}, and its reward has no such component (there are {components})"
    prompt, tokens = ints(trajectory.prompt_tokens), ints(trajectory.tokens)
    before, so_far = len(prompt) - trajectory.prefix, len(tokens) + trajectory.prefix
    if limits.prompt is not None and before > limits.prompt:
        return f"too long: a prompt of {before} tokens, and {limits.prompt} are allowed"
    if so_far > limits.completion:
        return f"too long: a completion of {so_far} tokens, and {limits.completion} are allowed"
    candidates = ints(trajectory.candidates)
    for column_name, column in (("prompt", prompt), ("completion", tokens), ("candidates", candidates)):
        if (strange := column[(column < 0) | (column >= limits.vocabulary)]).size:
            return f"token {strange[0]} of the {column_name} is not one of the model's {limits.vocabulary} tokens"
    return None
