"""The head's kernels, interpreted on a CPU, against the head without them in float64."""

import logging
import sys
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from streamppo.algorithms import chunked_head
from streamppo.algorithms.candidates import Candidates
from streamppo.algorithms.chunked_head import ChunkedHead, FusedHead, LogitShape, Products, chunked_logprobs_entropy

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them in tests/numerics/test_cuda.py")

N, D, V = 7, 5, 300
SETS = [[4], [0, 2, 299], [], [3, 5], [1, 6, 127, 128, 256], [0], []]
"""The candidates of each of the N tokens; none are all."""


@pytest.fixture(autouse=True)
def three_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "PIECE", N * 128)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def case(vocabulary: int = V, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias; targets that are candidates of their tokens."""
    targets = torch.tensor([some[-1] if some else 3 for some in SETS]) % vocabulary
    leaves = [random(N, D), random(vocabulary, D, seed=1), random(vocabulary, seed=2)]
    return [leaf.to(dtype) for leaf in leaves], targets


def cut() -> Candidates:
    """The sets one after another, each behind unrelated tokens."""
    counts = torch.tensor([len(some) for some in SETS])
    return Candidates(torch.tensor([9, 9, *chain(*SETS)], dtype=torch.int32), counts.cumsum(0) - counts + 2, counts)


def scored(
    leaves: list[Tensor], targets: Tensor, *, kernels: bool, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Tensor]:
    """Log-probs and entropies, and the gradients of a weighted sum of both."""
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    monkeypatch.setattr(chunked_head, "has_kernels", lambda *_: kernels)
    bias = own[2] if len(own) > 2 else None
    found = chunked_logprobs_entropy(own[0], own[1], targets, chunk=3, bias_V=bias, **options)
    return [*found, *torch.autograd.grad((torch.stack(found) * random(2, len(targets), seed=3)).sum(), own)]


def differences(made: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Norms of the differences over those of the expected values."""
    pairs = zip(made, wanted, strict=True)
    return [((one.double() - other).norm() / other.norm().clamp(min=1e-30)).item() for one, other in pairs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        (LogitShape(), 1.0),
        (LogitShape(), 0.7),
        (LogitShape(scale=0.3), torch.linspace(0.5, 1.5, N)),
        (LogitShape(soft_cap=2.0), 1.0),
        (LogitShape(scale=1.7, soft_cap=3.0), torch.linspace(0.5, 1.5, N)),
    ],
    ids=str,
)
@pytest.mark.parametrize("candidates", [None, cut()], ids=["whole", "cut"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_numbers_and_gradients_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch,
    shape: LogitShape,
    temperature: float | Tensor,
    candidates: Candidates | None,
    with_bias: bool,
) -> None:
    leaves, targets = case()
    leaves = leaves if with_bias else leaves[:2]
    options = {"temperature": temperature, "candidates": candidates, "shape": shape, "monkeypatch": monkeypatch}
    made = scored(leaves, targets, kernels=True, **options)
    wanted = scored([leaf.double() for leaf in leaves], targets, kernels=False, **options)
    assert {one.dtype for one in made} == {torch.float32}
    assert max(differences(made, wanted)) < 2e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("vocabulary", [1, 11, 127, 128, 129, 2049, 4096 + 5])
def test_a_vocabulary_of_any_size_gives_the_numbers_of_float64(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int
) -> None:
    leaves, targets = case(vocabulary)
    for piece in (N * 1024, 2**27):
        monkeypatch.setattr(chunked_head, "PIECE", piece)
        made = scored(leaves, targets, kernels=True, monkeypatch=monkeypatch)
        wanted = scored([leaf.double() for leaf in leaves], targets, kernels=False, monkeypatch=monkeypatch)
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("candidates", [None, cut()], ids=["whole", "cut"])
@pytest.mark.parametrize(("float32", "tolerance"), [(True, 4e-4), (False, 1e-2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_of_16_bits_is_as_far_from_float64_as_without_kernels(
    monkeypatch: pytest.MonkeyPatch, candidates: Candidates | None, float32: bool, tolerance: float, dtype: torch.dtype
) -> None:
    def multiply(left: Tensor, right: Tensor) -> Tensor:
        assert left.dtype == right.dtype == dtype
        return left.float() @ right.float()

    monkeypatch.setattr(chunked_head, "has_wide_products", lambda one, other: one.dtype == other.dtype == dtype)
    monkeypatch.setattr(chunked_head, "WIDE", Products(multiply, 2))
    leaves, targets = case(dtype=dtype)
    options = {"candidates": candidates, "float32_matmul": float32, "monkeypatch": monkeypatch}
    made = scored(leaves, targets, kernels=True, **options)
    other = scored(leaves, targets, kernels=False, **options)
    assert [one.dtype for one in made] == [one.dtype for one in other]
    # Both round their gradients at last: a few entries fall otherwise.
    assert max(differences(made, other)) < tolerance
    exact = scored([leaf.double() for leaf in leaves], targets, kernels=False, **options)
    for mine, others in zip(differences(made, exact), differences(other, exact), strict=True):
        assert mine < (1.1 if float32 else 1.5) * others + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("candidates", [None, cut()], ids=["whole", "cut"])
def test_every_number_of_a_gradient_is_written_and_sums_to_its_float32(
    dtype: torch.dtype, candidates: Candidates | None
) -> None:
    from streamppo.algorithms import head_kernels

    leaves, targets = case()
    logits, scores = leaves[0] @ leaves[1].T, tuple(random(4, N, seed=4).unbind())
    tokens = head_kernels.tokens((1.0, 0.0), None, targets, None, candidates)
    single, parts = torch.full((N, V), torch.nan), torch.full((3 * N, 384), torch.nan, dtype=dtype)
    head_kernels.write(logits, 0, tokens, scores, single)
    head_kernels.write(logits, 0, tokens, scores, parts[:, :V])
    assert single.isfinite().all()
    assert parts[:, V:].isnan().all(), "what lies beside a piece is not its own"
    torch.testing.assert_close(parts[:, :V].double().view(3, N, V).sum(0), single.double(), rtol=2**-23, atol=1e-30)
    assert candidates is None or (single[0] != 0).nonzero().tolist() == [[4]]


def test_a_token_without_an_alternative_has_log_prob_zero_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    logprobs, entropy, gradient, _ = scored(
        leaves[:2], targets, kernels=True, monkeypatch=monkeypatch, candidates=cut()
    )
    for n, some in enumerate(SETS):
        assert (len(some) == 1) is (logprobs[n].item() == 0.0) is (not gradient[n].any())
        assert entropy[n].item() == 0.0 or len(some) != 1


def test_a_target_outside_of_its_candidates_has_no_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    targets[4] = 2
    found = scored(leaves[:2], targets, kernels=True, monkeypatch=monkeypatch, candidates=cut())
    assert found[0].isneginf().tolist() == [False] * 4 + [True] + [False] * 2


def test_extreme_logits_stay_finite_and_a_certain_token_has_entropy_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.ones(2, 1), torch.zeros(V, 1)
    weight[0], weight[299] = -1e4, 1e4
    found = scored([hidden, weight], torch.tensor([0, 299]), kernels=True, monkeypatch=monkeypatch)
    assert found[0].tolist() == [-2e4, 0.0]
    assert found[1].tolist() == [0.0, 0.0]
    assert all(one.isfinite().all() for one in found)


def test_a_logit_that_is_no_number_is_seen_in_the_log_prob(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    leaves[1][200, 0] = torch.nan
    found = scored(leaves[:2], targets, kernels=True, monkeypatch=monkeypatch)
    assert found[0].isnan().all()


def test_an_empty_batch_gives_empty_results_and_zero_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    found = scored([leaves[0][:0], *leaves[1:]], targets[:0], kernels=True, monkeypatch=monkeypatch)
    assert found[0].shape == found[1].shape == (0,)
    assert not found[3].any()
    assert not found[4].any()


def test_the_same_tensors_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    first, again = (scored(leaves, targets, kernels=True, monkeypatch=monkeypatch, candidates=cut()) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_what_is_trained_gets_a_gradient(monkeypatch: pytest.MonkeyPatch, frozen: int) -> None:
    leaves, targets = case()
    wanted = scored(leaves, targets, kernels=True, monkeypatch=monkeypatch)[2:]
    for n, leaf in enumerate(leaves):
        leaf.requires_grad_(n != frozen)
    found = chunked_logprobs_entropy(*leaves[:2], targets, bias_V=leaves[2])
    (torch.stack(found) * random(2, N, seed=3)).sum().backward()
    for n, leaf in enumerate(leaves):
        assert leaf.grad is None if n == frozen else torch.equal(leaf.grad, wanted[n])


def test_nothing_of_the_size_of_tokens_times_vocabulary_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    monkeypatch.setattr(chunked_head, "has_kernels", lambda *_: True)
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        chunked_logprobs_entropy(leaves[0].requires_grad_(), leaves[1].requires_grad_(), targets)
    assert max(saved) == max(N * D, V * D)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8192, 16_384, 500_000])
@pytest.mark.parametrize("vocabulary", [1, 300, 32_000, 50_257, 151_936, 262_208])
def test_pieces_are_the_vocabulary_in_order_and_of_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int
) -> None:
    monkeypatch.undo()
    pieces = chunked_head.pieces(tokens, vocabulary)
    assert [token for piece in pieces for token in (piece.start, piece.stop)][1:-1:2] == [p.start for p in pieces[1:]]
    assert (pieces[0].start, pieces[-1].stop) == (0, vocabulary)
    widths = [piece.stop - piece.start for piece in pieces]
    assert all(width % 128 == 0 and width == widths[0] for width in widths[:-1])
    assert tokens * max(widths) <= chunked_head.PIECE + 128 * tokens


# --- the choice ----------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.fixture
def asked_anew() -> Any:
    chunked_head.has_kernels.cache_clear()
    yield
    chunked_head.has_kernels.cache_clear()


def test_the_kernels_run_where_their_first_run_succeeds(asked_anew: None) -> None:
    from streamppo.algorithms import head_kernels

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert head_kernels.fault(torch.device("cpu"), dtype) is None


def test_a_cpu_has_no_kernels_and_its_log_says_nothing(asked_anew: None, caplog: pytest.LogCaptureFixture) -> None:
    assert not chunked_head.has_kernels(torch.device("cpu"), torch.float32)
    assert caplog.records == []


@pytest.mark.parametrize("reason", ["type", "not installed", "no compiler"])
def test_a_gpu_without_the_kernels_says_why_in_one_line(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    from streamppo.algorithms import head_kernels

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")

    fault = head_kernels.fault
    monkeypatch.setattr(head_kernels, "read", fail)
    monkeypatch.setattr(head_kernels, "fault", lambda _, dtype: fault(torch.device("cpu"), dtype))
    if reason == "not installed":
        monkeypatch.delattr("streamppo.algorithms.head_kernels")
        monkeypatch.delitem(sys.modules, "streamppo.algorithms.head_kernels")
        monkeypatch.setitem(sys.modules, "triton", None)
    dtype = torch.float64 if reason == "type" else torch.bfloat16
    logging.getLogger("streamppo").propagate = True
    assert not any(chunked_head.has_kernels(GPU, dtype) for _ in range(3))
    (line,) = caplog.messages
    assert "fallback is slower" in line
    told = {"type": "torch.float64", "not installed": "triton", "no compiler": "Failed to find C compiler. Please"}
    assert told[reason] in line
    assert "\n" not in line


def test_the_head_is_the_one_that_the_choice_says(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = case()
    for serves, head in ((True, FusedHead), (False, ChunkedHead)):
        monkeypatch.setattr(chunked_head, "has_kernels", lambda *_, serves=serves: serves)
        found = chunked_logprobs_entropy(leaves[0].requires_grad_(), leaves[1], targets)[0]
        assert head.__name__ in type(found.grad_fn).__name__
