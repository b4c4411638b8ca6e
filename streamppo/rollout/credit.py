"""Where on a trajectory its rewards stand."""

from collections.abc import Sequence

import numpy as np

from streamppo.types import Flags, Reward


def place(reward: Reward, mask: Flags, turn_ends: Sequence[int]) -> bytes:
    """Token rewards [T] as a bytes column; empty when all of it stands on the last sampled token.

    `mask` [T] are the sampled tokens, `turn_ends` the place of the last token of each turn. The column sums to
    `reward.total`.
    """
    if not reward.tokens and not reward.turns:
        return b""
    rewards = np.zeros(len(mask), dtype=np.float32)
    sampled = np.flatnonzero(mask)
    if reward.tokens:
        rewards[sampled] += np.asarray(reward.tokens, dtype=np.float32)
    if reward.turns:
        rewards[list(turn_ends)] += np.asarray(reward.turns, dtype=np.float32)
    rewards[sampled[-1]] += np.float32(reward.score)
    return rewards.tobytes()
