"""The hash of a tensor: it adds up over shards, wherever they are cut, and finds changed bytes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.errors import WeightsError
from streamppo.weights import content as module
from streamppo.weights.content import check, hash_tensor, write

BLOCK_BYTES = 4 * module.BLOCK


def drawn(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_the_formula(raw: bytes) -> int:
    """The module's formula, word by word in whole numbers."""
    total = 0
    for word in range(-(-len(raw) // 4)):
        value = int.from_bytes(raw[4 * word : 4 * word + 4].ljust(4, b"\0"), "little", signed=True)
        total += (
            (module._split_mix(word % module.BLOCK) | 1) * (module._split_mix(2**32 + word // module.BLOCK) | 1) * value
        )
    return total % 2**64


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 7, 8, 9, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 6])
def test_it_is_the_formula_of_the_module(nbytes: int) -> None:
    raw = drawn(nbytes)
    assert hash_tensor(raw) == by_the_formula(bytes(raw.tolist()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shards_add_up_to_the_whole_wherever_it_is_cut(data: st.DataObject) -> None:
    nbytes = data.draw(st.sampled_from([1, 5, 40, 1001, BLOCK_BYTES + 9, 10 * BLOCK_BYTES + 3]))
    whole = drawn(nbytes, seed=nbytes)
    inside = sorted(data.draw(st.sets(st.integers(0, nbytes), max_size=5)))
    cuts = itertools.pairwise([0, *inside, nbytes])
    assert sum(hash_tensor(whole[start:end], start) for start, end in cuts) % 2**64 == hash_tensor(whole)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_two_swapped_elements_and_another_place_change_it(data: st.DataObject) -> None:
    whole = drawn(data.draw(st.integers(8, 3000))) | 1
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    flipped = whole.clone()
    flipped[at] ^= 1 << bit
    assert hash_tensor(flipped) != hash_tensor(whole)
    assert hash_tensor(whole, 4) != hash_tensor(whole)
    other = data.draw(st.integers(0, len(whole) - 1))
    swapped = whole.clone()
    swapped[[at, other]] = whole[[other, at]]
    assert (hash_tensor(swapped) == hash_tensor(whole)) == torch.equal(swapped, whole)


def test_signs_that_flip_together_are_seen() -> None:
    # Modulo 2**64 the highest bits of words of 64 bits would cancel each other: two of them make 2**64.
    numbers = torch.randn(4096)
    for pair in itertools.combinations(range(0, 4096, 97), 2):
        flipped = numbers.clone()
        flipped[list(pair)] *= -1
        assert hash_tensor(flipped) != hash_tensor(numbers)


def test_it_is_of_bits_so_that_zeros_and_nans_differ_by_theirs() -> None:
    assert hash_tensor(torch.tensor([0.0, 1.0])) != hash_tensor(torch.tensor([-0.0, 1.0]))
    one, other = (torch.tensor([bits, 7], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00001, 0x7FC00002))
    assert torch.isnan(one[0]) and torch.isnan(other[0])
    assert hash_tensor(one) != hash_tensor(other) and hash_tensor(one) == hash_tensor(one.clone())


def test_a_view_and_a_copy_of_it_are_equal() -> None:
    whole = torch.randn(40, 30, dtype=torch.bfloat16)
    assert hash_tensor(whole.T) == hash_tensor(whole.T.contiguous())
    # Its bytes begin in the middle of a word of memory.
    assert hash_tensor(whole.view(-1)[3:501]) == hash_tensor(whole.view(-1)[3:501].clone())


@pytest.mark.parametrize("into", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3), (4, 6, 2, 5)])
@pytest.mark.parametrize("part", [1, 40, 1 << 20])
def test_what_is_written_in_parts_has_the_hash_of_the_whole(
    into: torch.dtype, shape: tuple[int, ...], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", part)
    values = torch.randn(shape, dtype=torch.bfloat16)
    held = torch.zeros(shape, dtype=into)
    assert write(held, values) == hash_tensor(values)
    assert torch.equal(held.to(torch.bfloat16), values)
    turned = torch.zeros(shape[::-1], dtype=into).permute(tuple(reversed(range(len(shape)))))
    assert write(turned, values) == hash_tensor(values)


def test_the_hash_is_of_what_is_held_and_not_of_what_was_given() -> None:
    values = torch.randn(40, 3)
    too_narrow = torch.zeros(40, 3, dtype=torch.bfloat16)
    assert write(too_narrow, values) == hash_tensor(values.to(torch.bfloat16).to(torch.float32)) != hash_tensor(values)


def test_a_check_names_the_first_tensor_that_is_not_as_it_should_be() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(5)}
    expected = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
    check(expected, tensors.items())
    tensors["b"][2] = tensors["c"][4] = 2.0
    with pytest.raises(WeightsError, match=r"b differs from what was pushed \(2 tensors differ\)"):
        check(expected, tensors.items())
