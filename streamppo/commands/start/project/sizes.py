"""The numbers of a run, chosen from its model, its rows and its machine. Plain arithmetic: nothing is loaded."""

import math
from typing import NamedTuple

from streamppo.commands.start.project.policy import PolicyModel
from streamppo.commands.start.project.rows import MEASURED, DataRows
from streamppo.errors import ConfigError

SMALL = 20_000_000
"""A model with fewer parameters learns its answers without reasoning."""
RATES = ((1_000_000, 1e-3), (10_000_000, 3e-4), (100_000_000, 3e-5), (300_000_000, 5e-6))
"""(parameters, learning rate of a model with fewer); `RATE` for larger models."""
RATE = 1e-6
SAMPLES = 8
"""Completions of a prompt."""
REASONING = {True: 1024, False: 256}
"""Tokens of a completion with and without a GPU, for a reasoning model with short or unknown answers."""
MOST_TOKENS = 4096
"""Maximum tokens of a completion."""
SMALL_TOKENS = 64
"""Tokens of a small model's completion without answers to measure."""
VERSIONS = 3
"""Versions of the weights in Ray's object store."""
MIB = 2**20


class LengthGuess(NamedTuple):
    """The most tokens of prompt and completion, and the `reason` for the latter; `left_out` prompts are longer."""

    max_prompt_tokens: int
    max_tokens: int
    reason: str
    left_out: int


class Places(NamedTuple):
    """Ranks and actors, and GPUs of each; `memory_share` is SGLang's of a GPU, 0 on a CPU."""

    ranks: int
    actors: int
    gpus: float
    memory_share: float


class Sizes(NamedTuple):
    """The numbers of a run."""

    lr: float
    updates: int
    batch_size: int
    slots: int
    held_out: float
    evaluated: int
    object_store_mib: int
    completion: LengthGuess
    places: Places

    @property
    def samples(self) -> int:
        """Completions of a prompt."""
        return SAMPLES

    @property
    def in_flight(self) -> int:
        """Trajectories of an actor, with those that wait for their reward."""
        return 2 * self.slots


def choose(policy: PolicyModel, rows: DataRows, gpus: int, memory_mib: int) -> Sizes:
    """Choose for `gpus` GPUs, or for a CPU with this much memory. Raises `ConfigError` if no prompt fits the model."""
    small, length = is_small(policy), completion(policy, rows, gpus)
    share = min(0.25, max(0.05, 32 / rows.total))
    element = 2 if gpus else 4
    return Sizes(
        lr=next((rate for size, rate in RATES if policy.parameters < size), RATE),
        updates=300 if small else 200,
        batch_size=256 if small or gpus else 64,
        slots=256 if gpus else _slots(policy, length, memory_mib, most=192 if small else 64),
        held_out=round(share, 2),
        evaluated=max(1, min(256, int(round(share, 2) * rows.total))),
        object_store_mib=max(256, math.ceil(1.1 * VERSIONS * element * policy.parameters / MIB)),
        completion=length,
        places=_places(gpus),
    )


def is_small(policy: PolicyModel) -> bool:
    """True for a model that learns in minutes on a CPU."""
    return policy.parameters < SMALL


def completion(policy: PolicyModel, rows: DataRows, gpus: int) -> LengthGuess:
    """Choose the most tokens of prompts and completions, together within the model's context.

    Example: answers of up to 6 tokens, a model of 84,000 parameters -> 10 tokens: a quarter more, and their end.
    """
    preferred, reason = _preferred_tokens(policy, rows, gpus)
    longest = rows.longest_prompt if _all_measured(policy, rows) else math.ceil(1.25 * rows.longest_prompt)
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
    answer = rows.longest_answer
    if is_small(policy) and answer:
        return math.ceil(1.25 * answer) + 2, f"answers have up to {answer} tokens: a quarter more, and the end"
    if is_small(policy):
        return SMALL_TOKENS, "no row has an answer to measure"
    usual = REASONING[gpus > 0]
    if 2 * answer > usual:
        return min(2 * answer, MOST_TOKENS), f"answers have up to {answer} tokens: twice as many, {MOST_TOKENS} at most"
    return usual, "the model writes before it answers" + (f", and answers have up to {answer} tokens" if answer else "")


def _all_measured(policy: PolicyModel, rows: DataRows) -> bool:
    return policy.is_known and rows.total <= MEASURED


def _slots(policy: PolicyModel, length: LengthGuess, memory_mib: int, *, most: int) -> int:
    """The number of completions whose cache takes at most a quarter of the memory."""
    if policy.cache is None:
        return most
    slot = policy.cache * (length.max_prompt_tokens + length.max_tokens)
    return max(1, min(most, memory_mib * MIB // 4 // slot))


def _places(gpus: int) -> Places:
    """Ranks and engines share one GPU; of several GPUs, ranks have half, rounded down."""
    if not gpus:
        return Places(1, 1, 0, 0)
    if gpus == 1:
        return Places(1, 1, 0.5, 0.45)
    return Places(gpus // 2, gpus - gpus // 2, 1, 0.85)
