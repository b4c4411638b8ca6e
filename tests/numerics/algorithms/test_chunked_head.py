"""Chunked log-probs and entropy against plain floats and naive torch, and their memory."""

import math
from itertools import chain
from typing import NamedTuple, cast

import pytest
import torch
from torch import Tensor

from streamppo.algorithms import chunked_head
from streamppo.algorithms.candidates import Candidates
from streamppo.algorithms.chunked_head import ChunkedHead, Extent, LogitShape, Products, chunked_logprobs_entropy

N, D, V = 7, 5, 11


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_values_equal_a_loop_over_plain_floats(chunk: int) -> None:
    hidden, weight, targets = tensors()
    logprobs, entropy = chunked_logprobs_entropy(hidden, weight, targets, temperature=0.7, chunk=chunk)
    for n in range(N):
        z = [sum(h * w for h, w in zip(hidden[n].tolist(), row, strict=True)) / 0.7 for row in weight.tolist()]
        log_norm = math.log(sum(math.exp(x) for x in z))
        assert logprobs[n].item() == pytest.approx(z[int(targets[n])] - log_norm)
        assert entropy[n].item() == pytest.approx(-sum(math.exp(x - log_norm) * (x - log_norm) for x in z))


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_of_both_outputs_equal_those_of_the_naive_form(chunk: int, per_token: bool) -> None:
    hidden, weight, targets = tensors()
    temperature = torch.linspace(0.5, 1.5, N).double() if per_token else torch.full((N,), 0.8).double()
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    expected = torch.autograd.grad((torch.stack(naive(*leaves, targets, temperature)) * up).sum(), leaves)
    knob = temperature if per_token else temperature[0].item()
    got = chunked_logprobs_entropy(*leaves, targets, temperature=knob, chunk=chunk)
    for actual, wanted in zip(torch.autograd.grad((torch.stack(got) * up).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "shape", [LogitShape(), LogitShape(scale=0.3), LogitShape(soft_cap=2.0), LogitShape(scale=1.7, soft_cap=3.0)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_bias_a_scale_and_a_soft_cap_are_those_of_the_naive_form(shape: LogitShape, temperature: float) -> None:
    hidden, weight, targets = tensors()
    bias = torch.randn(V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    y_NV = shape.scale * (hidden @ weight.T + bias)
    z_NV = shape.soft_cap * torch.tanh(y_NV / shape.soft_cap) if shape.soft_cap else y_NV
    log_p_NV = (z_NV / temperature).log_softmax(-1)
    wanted = torch.stack([log_p_NV.gather(-1, targets[:, None])[:, 0], -(log_p_NV.exp() * log_p_NV).sum(-1)])
    found = torch.stack(
        chunked_logprobs_entropy(hidden, weight, targets, temperature=temperature, chunk=3, bias_V=bias, shape=shape)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad((found * up).sum(), leaves), torch.autograd.grad((wanted * up).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_frozen_weight_gets_no_gradient_and_logprobs_alone_can_be_used() -> None:
    hidden, weight, targets = tensors()
    hidden.requires_grad_()
    logprobs, _ = chunked_logprobs_entropy(hidden, weight, targets, chunk=2)
    logprobs.sum().backward()
    assert weight.grad is None
    again = hidden.detach().clone().requires_grad_()
    naive(again, weight, targets, torch.ones(N).double())[0].sum().backward()
    torch.testing.assert_close(hidden.grad, again.grad)


@pytest.mark.parametrize(("float32_matmul", "tolerance"), [(True, 1e-5), (False, 5e-2)])
def test_bfloat16_inputs_give_float32_numbers_and_bfloat16_gradients(float32_matmul: bool, tolerance: float) -> None:
    hidden, weight, targets = tensors(torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact, _ = naive(*wide, targets, torch.ones(N).double())
    expected = torch.autograd.grad(exact.sum(), wide)
    logprobs, entropy = chunked_logprobs_entropy(*leaves, targets, chunk=3, float32_matmul=float32_matmul)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=tolerance)
    for gradient, wanted in zip(torch.autograd.grad(logprobs.sum(), leaves), expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), wanted, rtol=0.05, atol=0.05)


def multiply_wide(left: Tensor, right: Tensor) -> Tensor:
    """Compute as tensor cores do: factors of 16 bits, sums in float32."""
    assert left.dtype == right.dtype == torch.bfloat16
    return left.float() @ right.float()


def head_of_bfloat16(*, wide: bool, parts: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Log-probs, entropies and both gradients at a head whose rows have a large mean in common."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(64, 48, generator=generator).mul(4).bfloat16().requires_grad_()
    rows = torch.randn(500, 48, generator=generator) + 5 * torch.randn(48, generator=generator)
    weight = rows.mul(0.05).bfloat16().requires_grad_()
    targets = torch.randint(0, 500, (64,), generator=generator)
    monkeypatch.setattr(chunked_head, "has_wide_products", lambda *_: wide)
    monkeypatch.setattr(chunked_head, "WIDE", Products(multiply_wide, parts))
    found = chunked_logprobs_entropy(hidden, weight, targets, chunk=24)
    up = torch.randn(2, 64, generator=generator)
    return [*found, *torch.autograd.grad((torch.stack(found) * up).sum(), (hidden, weight))]


def test_products_of_16_bit_factors_that_are_summed_in_float32_are_the_float32_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = head_of_bfloat16(wide=False, parts=2, monkeypatch=monkeypatch)
    wide = head_of_bfloat16(wide=True, parts=2, monkeypatch=monkeypatch)
    assert [one.dtype for one in wide] == [one.dtype for one in plain]
    for one, other in zip(wide[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    # Both forms round their gradients to bfloat16 at last, an error of about 1.7e-3: a few entries fall otherwise.
    for one, other in zip(wide[2:], plain[2:], strict=True):
        assert (one - other).float().norm() < 4e-4 * other.float().norm()


def test_a_gradient_of_one_16_bit_number_would_not_be_the_float32_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = head_of_bfloat16(wide=False, parts=1, monkeypatch=monkeypatch)
    wide = head_of_bfloat16(wide=True, parts=1, monkeypatch=monkeypatch)
    assert (wide[2] - plain[2]).float().norm() > 2e-3 * plain[2].float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_numbers_of_16_bits_are_a_gradient_to_one_part_in_a_hundred_thousand(dtype: torch.dtype) -> None:
    gradient = torch.randn(4, 1000, generator=torch.Generator().manual_seed(4))
    high, low = chunked_head.split(gradient.clone(), dtype, 2)
    assert high.dtype == low.dtype == dtype
    assert ((high.double() + low.double() - gradient).abs() <= 2.0**-16 * gradient.abs() + 1e-7).all()


class OnGpu(NamedTuple):
    """A fake tensor on a GPU, with the properties that decide the products."""

    dtype: torch.dtype
    is_cuda: bool = True


def test_products_are_summed_in_float32_only_for_16_bit_factors_of_one_type_on_a_gpu() -> None:
    def wide(hidden: OnGpu, weight: OnGpu) -> bool:
        return chunked_head.has_wide_products(cast(Tensor, hidden), cast(Tensor, weight))

    half, brain, single = (OnGpu(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    assert wide(brain, brain)
    assert wide(half, half)
    assert not wide(single, single)
    assert not wide(single, brain)
    assert not wide(half, brain)
    assert not wide(brain._replace(is_cuda=False), brain._replace(is_cuda=False))


def test_products_on_a_gpu_are_torchs_own_of_16_bit_factors_with_gradients_in_two_parts() -> None:
    left, right = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 5), (5, 2)))
    made = chunked_head.WIDE.multiply(left, right)
    assert (made.shape, made.dtype) == ((3, 2), torch.float32)
    assert chunked_head.WIDE.parts == 2


def test_a_temperature_of_one_is_not_multiplied_by_and_changes_no_bit() -> None:
    hidden, weight, targets = tensors(torch.float32)
    as_number = chunked_logprobs_entropy(hidden, weight, targets, temperature=1.0, chunk=3)
    per_token = chunked_logprobs_entropy(hidden, weight, targets, temperature=torch.ones(N), chunk=3)
    assert all(torch.equal(one, other) for one, other in zip(as_number, per_token, strict=True))


def test_autocast_does_not_round_the_logits() -> None:
    hidden, weight, targets = tensors(torch.float32)
    hidden.requires_grad_()
    expected = chunked_logprobs_entropy(hidden, weight, targets, chunk=3)
    (wanted,) = torch.autograd.grad(expected[0].sum(), hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chunked_logprobs_entropy(hidden, weight, targets, chunk=3)
        (gradient,) = torch.autograd.grad(got[0].sum(), hidden)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(gradient, wanted)


def test_nothing_of_the_size_of_tokens_times_vocabulary_is_kept_for_backward() -> None:
    hidden, weight, targets = tensors()
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        chunked_logprobs_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk=2)
    assert max(saved) == max(N * D, V * D)
    assert len(saved) == 5


def test_extreme_logits_stay_finite_and_a_certain_token_has_entropy_zero() -> None:
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    logprobs, entropy = chunked_logprobs_entropy(hidden, weight, torch.tensor([1]))
    assert logprobs.item() == -2e4
    assert entropy.item() == 0.0


def test_an_empty_batch_gives_empty_results_and_zero_gradients() -> None:
    hidden, weight, targets = tensors()
    weight.requires_grad_()
    logprobs, entropy = chunked_logprobs_entropy(hidden[:0], weight, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


# --- candidates ----------------------------------------------------------------------------------------------

SETS = [[4], [0, 2, 10], [], [3, 5], [1, 6, 7, 8, 9], [0], []]
"""The candidates of each of the N tokens; none are all."""


def cut(sets: list[list[int]] = SETS) -> Candidates:
    """The sets one after another, each behind unrelated tokens."""
    counts = torch.tensor([len(some) for some in sets])
    return Candidates(torch.tensor([9, 9, *chain(*sets)], dtype=torch.int32), counts.cumsum(0) - counts + 2, counts)


def targets_of(sets: list[list[int]] = SETS) -> Tensor:
    return torch.tensor([some[-1] if some else 3 for some in sets])


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_with_candidates_values_are_those_of_a_softmax_over_them_in_plain_floats(chunk: int) -> None:
    hidden, weight, _ = tensors()
    got = chunked_logprobs_entropy(hidden, weight, targets_of(), temperature=0.7, chunk=chunk, candidates=cut())
    for n, some in enumerate(SETS):
        z = [sum(h * w for h, w in zip(hidden[n].tolist(), row, strict=True)) / 0.7 for row in weight.tolist()]
        among = {token: math.exp(z[token]) for token in some or range(V)}
        p = {token: weight / sum(among.values()) for token, weight in among.items()}
        assert got[0][n].item() == pytest.approx(math.log(p[int(targets_of()[n])]))
        assert got[1][n].item() == pytest.approx(-sum(share * math.log(share) for share in p.values()))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_with_candidates_gradients_are_those_of_the_renormalised_softmax(chunk: int) -> None:
    hidden, weight, _ = tensors()
    up = torch.randn(2, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    rows = []
    for n, some in enumerate(SETS):
        kept = torch.tensor(some or list(range(V)))
        log_p = (leaves[0][n] @ leaves[1].T / 0.7)[kept].log_softmax(-1)
        rows.append(torch.stack([log_p[kept == targets_of()[n]][0], -(log_p.exp() * log_p).sum()]))
    expected = torch.autograd.grad((torch.stack(rows, 1) * up).sum(), leaves)
    got = chunked_logprobs_entropy(*leaves, targets_of(), temperature=0.7, chunk=chunk, candidates=cut())
    for actual, wanted in zip(torch.autograd.grad((torch.stack(got) * up).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


def test_a_token_without_an_alternative_has_log_prob_zero_and_no_gradient_at_all() -> None:
    hidden, weight, _ = tensors(torch.float32)
    hidden.requires_grad_()
    logprobs, entropy = chunked_logprobs_entropy(hidden, weight, targets_of(), chunk=3, candidates=cut())
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), hidden)
    for n, some in enumerate(SETS):
        assert (len(some) == 1) is (logprobs[n].item() == 0.0) is (not gradient[n].any())
        assert entropy[n].item() == 0.0 or len(some) != 1


def test_sets_of_all_tokens_change_no_bit() -> None:
    hidden, weight, targets = tensors(torch.float32)
    whole = cut([[] for _ in range(N)])
    spelled = cut([list(range(V)) for _ in range(N)])
    plain = chunked_logprobs_entropy(hidden, weight, targets, chunk=3)
    for candidates in (whole, spelled):
        got = chunked_logprobs_entropy(hidden, weight, targets, chunk=3, candidates=candidates)
        assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))


@pytest.mark.parametrize("candidates", [None, cut()], ids=["whole", "cut"])
def test_gradcheck_agrees(candidates: Candidates | None) -> None:
    hidden, weight, _ = tensors()
    targets, inverse = targets_of(), torch.linspace(0.5, 1.5, N).double()
    assert torch.autograd.gradcheck(
        lambda h, w: ChunkedHead.apply(h, w, None, targets, inverse, Extent(3, candidates)),
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


def test_shapes_that_make_no_sense_are_refused() -> None:
    hidden, weight, targets = tensors()
    with pytest.raises(ValueError, match=r"must be \[N, D\], \[V, D\] and \[N\]"):
        chunked_logprobs_entropy(hidden, weight.T, targets)
