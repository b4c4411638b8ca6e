"""A positional hash of a tensor's bytes. The hashes of shards add up to the hash of the whole tensor. Pure: no Ray.

    content = sum over w of coefficient(w) * word(w)   mod 2**64

The bytes of a tensor are read as little-endian 32-bit words. w is a word's index in the whole tensor, and coefficients
are odd pseudo-random 64-bit numbers. A shard sums its words, and single bytes of words that it shares with another
shard. The sum over all shards is the hash of the whole tensor, for any sharding and on any device. This is multilinear
hashing (Lemire and Kaser 2012, https://arxiv.org/abs/1202.4961): two different tensors have the same hash with a
probability of at most 2**-32. The hash detects faults, not attacks.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from streamppo.errors import WeightsError

BLOCK = 1 << 15
"""Words per block. All blocks share one table of coefficients, which each block multiplies by an odd factor."""
BLOCKS_AT_ONCE = 16
"""The number of blocks that a CPU widens and multiplies at a time, so that they stay in its cache."""
BLOCKS_AT_ONCE_ON_GPU = 1024
PART_BYTES = 1 << 21
"""The number of bytes that `write` copies and hashes at a time, so that they stay in the processor's cache."""
_MASK = 2**64 - 1


def hash_tensor(part: Tensor, first: int = 0) -> int:
    """Return the hash of `part`, which starts at byte `first` of the whole tensor."""
    raw = part.detach().contiguous().view(-1).view(torch.uint8)
    if len(raw) < 8:
        return _hash_bytes(raw.tolist(), first) & _MASK
    head, tail = -first % 4, (first + len(raw)) % 4
    words = raw[head : len(raw) - tail] if head or tail else raw
    if words.data_ptr() % 4:
        words = words.clone()
    total = _hash_words(words.view(torch.int32), (first + head) // 4)
    if head or tail:
        total += _hash_bytes(raw[:head].tolist(), first)
        total += _hash_bytes(raw[len(raw) - tail :].tolist(), first + len(raw) - tail)
    return total & _MASK


def write(into: Tensor, values: Tensor) -> int:
    """Copy `values` to a tensor of the same shape, whose dtype represents them exactly; return the hash of the copy."""
    if not into.dim() or into.device.type != "cpu":
        return hash_tensor(into.copy_(values).to(values.dtype))
    total, row = 0, values[:1].nbytes
    rows = max(1, PART_BYTES // max(1, row))
    for first in range(0, len(into), rows):
        part = into[first : first + rows].copy_(values[first : first + rows])
        total += hash_tensor(part.to(values.dtype), first * row)
    return total & _MASK


def check(expected: Mapping[str, int], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Compute the tensors' hashes. Raise `WeightsError` with the first name if one differs from the `expected` hash."""
    compare(expected, ((name, hash_tensor(tensor)) for name, tensor in tensors))


def compare(expected: Mapping[str, int], hashes: Iterable[tuple[str, int]]) -> None:
    """Raise `WeightsError` with the first name if a hash differs from the `expected` hash of the same name."""
    wrong = [name for name, content in hashes if content != expected[name]]
    if wrong:
        raise WeightsError(f"{wrong[0]} differs from what was pushed ({len(wrong)} tensors differ)")


def _hash_words(words: Tensor, start: int) -> int:
    """Return the hash of int32 `words`; the first word has index `start`. Negative words count modulo 2**64."""
    table, total, offset = _table(words.device), 0, 0
    blocks_at_once = BLOCKS_AT_ONCE if words.device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU
    while offset < len(words):
        block, within = divmod(start + offset, BLOCK)
        if within or len(words) - offset < BLOCK:
            part = words[offset : offset + BLOCK - within]
            (block_sum,) = _hash_blocks(part[None], table[within : within + len(part)])
            total += block_sum * _factor(block)
        else:
            part = words[offset : offset + min(blocks_at_once, (len(words) - offset) // BLOCK) * BLOCK]
            sums: list[int] = _hash_blocks(part.view(-1, BLOCK), table)
            total += sum(block_sum * _factor(n) for n, block_sum in enumerate(sums, block))
        offset += len(part)
    return total


def _hash_blocks(blocks: Tensor, table: Tensor) -> list[int]:
    if blocks.device.type == "cpu":
        # einsum adds the products without storing them. `astype` widens faster than einsum would.
        return np.einsum("bw,w->b", blocks.numpy().astype(np.int64), table.numpy()).tolist()
    return (blocks.to(torch.int64) * table).sum(1).tolist()


def _hash_bytes(values: list[int], first: int) -> int:
    """Return the contribution of single bytes to the hash. The highest byte of a word is signed."""
    total = 0
    for at, value in enumerate(values, first):
        signed = value - 256 if at % 4 == 3 and value > 127 else value
        coefficient = (_split_mix(at // 4 % BLOCK) | 1) * _factor(at // 4 // BLOCK)
        total += (signed << 8 * (at % 4)) * coefficient
    return total


@lru_cache
def _table(device: torch.device) -> Tensor:
    coefficients = [_split_mix(n) | 1 for n in range(BLOCK)]
    return torch.tensor(
        [coefficient - 2**64 if coefficient >> 63 else coefficient for coefficient in coefficients],
        dtype=torch.int64,
        device=device,
    )


@lru_cache(1 << 16)
def _factor(block: int) -> int:
    return _split_mix(2**32 + block) | 1


def _split_mix(number: int) -> int:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014) for one state."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
