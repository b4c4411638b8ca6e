"""Splits rows into training and evaluation by the content of their prompts, so that the two parts share no prompt."""

import unicodedata
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np

from streamppo.errors import TaskError
from streamppo.terminal import counted
from streamppo.types import Prompt

T = TypeVar("T")


class SplitPrompts(NamedTuple):
    """Training prompts, with repetitions, and held-out prompts, each once; `notes` are sentences about them."""

    training: Sequence[Prompt]
    held_out: Sequence[Prompt]
    notes: Sequence[str] = ()


def key(text: str) -> bytes:
    """Return a hash of a text that ignores case, white space and the form of characters (NFKC)."""
    normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split()) or text
    return blake2b(normal.encode(errors="surrogatepass"), digest_size=16).digest()


def divide(prompts: Sequence[Prompt], keys: Sequence[bytes], share: float, seed: int) -> SplitPrompts:
    """Hold out a share of the distinct prompts, at least one unless it is 0. Raises `TaskError` if no row is left."""
    first: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, number)
    distinct = list(first.values())
    count = held_out_count(len(distinct), share)
    if count >= len(distinct):
        raise TaskError(
            f"{counted(len(prompts), 'row')} with {counted(len(distinct), 'different prompt')}: "
            f"held_out ({share:g}) leaves none to train on; lower it, name other rows as `evaluation`, "
            "or set held_out = 0"
        )
    order = np.random.default_rng((seed, 0xF11E)).permutation(len(distinct))
    rows = [distinct[int(place)] for place in order[:count]]
    training = exclude(prompts, keys, {keys[row] for row in rows})
    return SplitPrompts(training, [prompts[row] for row in rows])


def held_out_count(count: int, share: float) -> int:
    """Return how many of `count` are held out: max(1, round(share * count)), or 0 for a share of 0."""
    return max(1, round(share * count)) if share else 0


def exclude(values: Sequence[T], keys: Sequence[bytes], excluded: set[bytes]) -> list[T]:
    """Return the values whose keys are not in `excluded`."""
    return [value for value, key in zip(values, keys, strict=True) if key not in excluded]


def describe_repeats(keys: Iterable[bytes], name: str) -> Sequence[str]:
    """Return a sentence with the number of rows that repeat an earlier row's prompt, if there are any."""
    all_keys = list(keys)
    count = len(all_keys) - len(set(all_keys))
    if not count:
        return ()
    verb = "repeats" if count == 1 else "repeat"
    return (f"{name}: {count} of {len(all_keys)} rows {verb} the prompt of an earlier row",)


def describe_overlap(held_out: Sequence[bytes], training: set[bytes], name: str) -> Sequence[str]:
    """Return a sentence with the number of evaluation prompts that are also in the training rows, if there are any."""
    count = sum(key in training for key in held_out)
    if not count:
        return ()
    verb = "is" if count == 1 else "are"
    return (
        f"{name}: {count} of {len(held_out)} evaluation prompts {verb} in the training rows too: "
        "their accuracy measures memory",
    )
