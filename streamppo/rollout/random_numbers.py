"""The random numbers of a completion. They depend only on its identity, not on the engine or on concurrent rows.

    seed = blake2b(run's seed, task, prompt, sample, attempt), and of a later turn blake2b(seed, turn)
    u_t  = splitmix64(seed + t * GOLDEN) / 2**64, for token t of the turn

So a run with `queue.max_lag = 0` samples the same tokens with any number of rollout actors, and two runs that differ in
one setting have common random numbers. Splitmix64 is the generator of https://doi.org/10.1145/2714064.2660195.
"""

import hashlib

import numpy as np

from streamppo.types import Identity

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: the step of splitmix64."""


def seed_of(run: int, identity: Identity) -> int:
    """Return the seed of a trajectory, in a run whose seed is `run`."""
    return _hash(f"{run}/{identity.task}/{identity.prompt}/{identity.sample}/{identity.attempt}")


def seed_of_turn(seed: int | None, turn: int) -> int | None:
    """Return the seed of a turn; turn 0 has the trajectory's `seed`. None if `seed` is None."""
    return _hash(f"{seed}/{turn}") if seed is not None and turn else seed


def seed_after(seed: int | None, tokens: int) -> int | None:
    """Return the seed whose token 0 has the number u of token `tokens` of `seed`; None if `seed` is None."""
    return None if seed is None else (seed + tokens * GOLDEN) % 2**64


def seed_of_retry(seed: int, number: int) -> int:
    """Return the seed of additional completion `number`, counted from 0, of a prompt whose seed is `seed`."""
    return _hash(f"{seed}/try/{number}")


def uniform(seeds_B: np.ndarray, place_B: np.ndarray) -> np.ndarray:
    """Return u [B] (float64, 0 < u < 1) of token `place_B` of each completion; `seeds_B` (uint64) are their seeds."""
    z_B = seeds_B + (place_B.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z_B ^= z_B >> np.uint64(31)
    # With 48 bits, u times the sum of all probabilities stays below that sum in float64.
    return ((z_B >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
