"""Chooses the numeric settings of a run by its model, its rows and its machine, without loading anything."""

import math
from typing import NamedTuple

from streamppo.commands.start.project.policy import PolicyModel
from streamppo.commands.start.project.rows import LONG, MEASURED, DataRows
from streamppo.errors import ConfigError

SMALL = 20_000_000
"""A model with fewer parameters is small: it learns answers without reasoning before them."""
RATES = ((1_000_000, 1e-3), (10_000_000, 3e-4), (100_000_000, 3e-5), (300_000_000, 5e-6))
"""(parameters, learning rate of a model with fewer parameters). Larger models get `RATE`."""
RATE = 1e-6
SAMPLES = 8
REASONING = {True: 1024, False: 256}
"""Maximum tokens of a completion with and without a GPU, for a large model with short or unknown answers."""
MOST_TOKENS = 4096
SMALL_TOKENS = 64
"""Maximum tokens of a small model's completion if no answer was measured."""
CPU_TOKENS = 2048
"""Tokens of a pass of a large model on a CPU: a larger pass takes as long for each token, and more memory."""
VERSIONS = 3
MIB = 2**20


class LengthGuess(NamedTuple):
    """Maximum tokens of prompt and completion, and the `reason` for `max_tokens`. `left_out` counts longer prompts."""

    max_prompt_tokens: int
    max_tokens: int
    reason: str
    left_out: int


class Places(NamedTuple):
    """Number of ranks and actors, and the GPUs of each. `memory_share` is the share of a GPU's memory for SGLang."""

    ranks: int
    actors: int
    gpus: float
    memory_share: float


class Sizes(NamedTuple):
    """The numeric settings of a run. None keeps the field's default."""

    lr: float
    updates: int
    batch_size: int
    slots: int
    held_out: float
    evaluated: int
    object_store_mib: int
    micro_batch_tokens: int | None
    completion: LengthGuess
    places: Places

    @property
    def samples(self) -> int:
        return SAMPLES

    @property
    def in_flight(self) -> int:
        """Trajectories of an actor, including those that wait for a reward."""
        return 2 * self.slots


def choose(policy: PolicyModel, rows: DataRows, gpus: int, memory_mib: int) -> Sizes:
    """Choose the settings for `gpus` GPUs, or for a CPU. Raises `ConfigError` if no prompt fits the model's context."""
    small, length = is_small(policy), completion(policy, rows, gpus)
    share = round(min(0.25, max(0.05, 32 / rows.total)), 2)
    element = 2 if gpus else 4
    return Sizes(
        lr=next((rate for size, rate in RATES if policy.parameters < size), RATE),
        updates=300 if small else 200,
        batch_size=256 if small or gpus else 64,
        slots=256 if gpus else _slots(policy, length, memory_mib, most=192 if small else 64),
        held_out=share,
        evaluated=min(256, rows.held_out(share, length.max_prompt_tokens)),
        object_store_mib=max(256, math.ceil(1.1 * VERSIONS * element * policy.parameters / MIB)),
        micro_batch_tokens=None if small or gpus else CPU_TOKENS,
        completion=length,
        places=_places(gpus),
    )


def is_small(policy: PolicyModel) -> bool:
    """True if the model learns in minutes on a CPU."""
    return policy.parameters < SMALL


def completion(policy: PolicyModel, rows: DataRows, gpus: int) -> LengthGuess:
    """Choose the maximum tokens of prompt and completion, whose sum fits the model's context."""
    preferred, reason = _preferred_tokens(policy, rows, gpus)
    is_measured = policy.is_known and rows.total <= MEASURED
    longest = rows.longest_prompt if is_measured else math.ceil(1.25 * rows.longest_prompt)
    room = max(policy.context - longest, min(preferred, policy.context // 2))
    if preferred > room:
        reason = f"as many as the model's context ({policy.context}) leaves next to the longest prompt"
    max_tokens = max(1, min(preferred, room))
    bound = min(longest, policy.context - max_tokens)
    left_out = sum(length > bound for length in rows.prompts)
    if left_out == len(rows.prompts):
        raise ConfigError(
            f"{rows.data}: the shortest prompt has {min(rows.prompts)} tokens, and {policy.path} reads "
            f"{policy.context} at once: no prompt fits it with its answer"
        )
    return LengthGuess(bound, max_tokens, reason, left_out)


def _preferred_tokens(policy: PolicyModel, rows: DataRows, gpus: int) -> tuple[int, str]:
    longest, long = rows.longest_answer, rows.long_answer
    if is_small(policy) and longest:
        return math.ceil(1.25 * longest) + 2, f"1.25 times the longest answer ({longest} tokens), plus 2"
    if is_small(policy):
        return SMALL_TOKENS, "no row has an answer to measure"
    usual = REASONING[gpus > 0]
    measured = f"{LONG:.0%} of the answers have at most {long} tokens"
    if 2 * long > usual:
        return min(2 * long, MOST_TOKENS), f"{measured}: twice as many, {MOST_TOKENS} at most"
    return usual, "the model writes before it answers" + (f", and {measured}" if long else "")


def _slots(policy: PolicyModel, length: LengthGuess, memory_mib: int, *, most: int) -> int:
    if policy.cache is None:
        return most
    slot = policy.cache * (length.max_prompt_tokens + length.max_tokens)
    return max(1, min(most, memory_mib * MIB // 4 // slot))


def _places(gpus: int) -> Places:
    """A single GPU is shared by rank and engine. Of several GPUs, ranks get half, rounded down."""
    if not gpus:
        return Places(1, 1, 0, 0)
    if gpus == 1:
        return Places(1, 1, 0.5, 0.45)
    return Places(gpus // 2, gpus - gpus // 2, 1, 0.85)
