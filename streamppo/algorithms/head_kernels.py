"""Two kernels of the head on a GPU: one reads logits once, the other writes their gradient in the dtype of the
products.

N tokens, P vocabulary entries in one piece, M candidates of all tokens together. A gradient is stored as the sum of
`parts` tensors, in parts * N rows. Each program handles one token and sums in a fixed order: equal tensors give equal
bits.
"""

# Triton's kernel language has no types, so strict checks are off.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

from subprocess import SubprocessError
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from streamppo.algorithms.candidates import Candidates

BLOCK, WARPS = 1024, 4
"""BLOCK logits are in a program's registers, one per lane; a program has WARPS warps of 32 threads."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""The initial maximum of the online softmax: a finite number, so that differences from it are finite."""


class TokenInputs(NamedTuple):
    """The inputs of a token's log-prob, without the matrix products; see `chunked_head` and `Candidates`."""

    scale: float
    soft_cap: float
    bias_V: Tensor | None
    targets_N: Tensor
    inverse_temperature_N: Tensor | None
    candidates_M: Tensor | None
    starts_N: Tensor | None
    counts_N: Tensor | None


def tokens(
    shape: tuple[float, float],
    bias_V: Tensor | None,
    targets_N: Tensor,
    inverse_temperature_N: Tensor | None,
    candidates: Candidates | None,
) -> TokenInputs:
    """`TokenInputs` with contiguous tensors, for the kernels."""
    bias_V, inverse_temperature_N, *sets = (
        None if column is None else column.contiguous()
        for column in (bias_V, inverse_temperature_N, *(candidates or (None, None, None)))
    )
    return TokenInputs(*shape, bias_V, targets_N.contiguous(), inverse_temperature_N, *sets)


def fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the kernels do not run on `device`, found by a trial with 16 tokens; None if they run."""
    logits_NP, gradient_QP = (
        torch.zeros(16, 128, device=device, dtype=precision) for precision in (torch.float32, dtype)
    )
    softmax_4N = softmax(logits_NP)
    trial_tokens = tokens((1.0, 0.0), None, torch.zeros(16, device=device, dtype=torch.int64), None, None)
    try:
        read(logits_NP, 0, trial_tokens, softmax_4N)
        write(logits_NP, 0, trial_tokens, tuple(softmax_4N), gradient_QP)
    except (RuntimeError, ImportError, OSError, SubprocessError, TritonError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def softmax(rows: Tensor) -> Tensor:
    """The initial state of the online softmax of N tokens, [4, N]: maximum, total, moment and the target's logit."""
    state_4N = torch.zeros(4, len(rows), device=rows.device)
    state_4N[0], state_4N[3] = LOWEST.value, -torch.inf
    return state_4N


def read(logits_NP: Tensor, first: int, tokens: TokenInputs, softmax_4N: Tensor) -> None:
    """Update each token's online softmax with the piece of the vocabulary that starts at `first`.

    maximum = max(z),  total = sum(exp(z - maximum)),  moment = sum(exp(z - maximum) * (z - maximum)),  z[target]
    """
    if N := len(logits_NP):
        size = (logits_NP.stride(0), logits_NP.shape[1], first, N)
        read_logits[(N,)](logits_NP, tokens, softmax_4N, size, BLOCK, num_warps=WARPS)


def write(logits_NP: Tensor, first: int, tokens: TokenInputs, scores: tuple[Tensor, ...], gradient_QP: Tensor) -> None:
    """Write the gradient with respect to a piece's products; each entry is written as Q / N numbers that add up to it.

    `scores` are the log-normalisers, the entropies, and the gradients of log-probs and of entropies, [N] each.
    """
    if N := len(logits_NP):
        size = (logits_NP.stride(0), logits_NP.shape[1], first, N, gradient_QP.stride(0), len(gradient_QP) // N)
        write_gradient[(N,)](logits_NP, tokens, scores, gradient_QP, size, BLOCK, num_warps=WARPS)


@triton.jit
def read_logits(logits_NP, tokens, softmax_4N, size, BLOCK: tl.constexpr):
    """Update the online softmax of one token with a piece of its logits."""
    stride, width, first, N = size
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, state = logits_NP + n * stride, softmax_4N + n
    # Each lane has a softmax of the logits that it reads; lane 0 starts from the token's state.
    maximum = tl.load(state + 0 * lane, mask=lane == 0, other=LOWEST)
    total = tl.load(state + N + 0 * lane, mask=lane == 0, other=0.0)
    moment = tl.load(state + 2 * N + 0 * lane, mask=lane == 0, other=0.0)
    score = tl.load(state + 3 * N + 0 * lane, mask=lane == 0, other=-float("inf"))
    target = tl.load(tokens.targets_N + n) - first
    dense_width = width
    if tokens.counts_N is not None:
        dense_width = tl.where(tl.load(tokens.counts_N + n) == 0, width, 0)
    for begin in range(0, dense_width, BLOCK):
        column = begin + lane
        live = column < width
        z = tl.where(live, logits(row, column, live, first, tokens) * inverse_temperature(tokens, n), -float("inf"))
        score = tl.where(column == target, tl.maximum(score, z), score)
        maximum, total, moment = add_logit(z, maximum, total, moment)
    if tokens.counts_N is not None:
        for begin in range(0, tl.load(tokens.counts_N + n), BLOCK):
            column, live = candidates(begin, n, first, width, tokens, BLOCK)
            z = tl.where(live, logits(row, column, live, first, tokens) * inverse_temperature(tokens, n), -float("inf"))
            score = tl.where(column == target, tl.maximum(score, z), score)
            maximum, total, moment = add_logit(z, maximum, total, moment)
    highest = tl.max(maximum)
    below = maximum - highest
    tl.store(state, highest)
    tl.store(state + N, tl.sum(tl.exp(below) * total))
    tl.store(state + 2 * N, tl.sum(tl.exp(below) * (moment + below * total)))
    tl.store(state + 3 * N, tl.max(score))


@triton.jit
def write_gradient(logits_NP, tokens, scores, gradient_QP, size, BLOCK: tl.constexpr):
    """Write a piece of one token's gradient; it is 0 outside of the token's candidates."""
    stride, width, first, N, wide, parts = size
    n = tl.program_id(0).to(tl.int64)
    row, out = logits_NP + n * stride, gradient_QP + n * wide
    is_dense = True
    if tokens.counts_N is not None:
        is_dense = tl.load(tokens.counts_N + n) == 0
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        live = column < width
        gradient = tl.where(is_dense, product_gradient(row, column, live, (n, first), tokens, scores), 0.0)
        for part in range(parts):
            rounded = gradient.to(gradient_QP.dtype.element_ty)
            tl.store(out + part * N * wide + column, rounded, mask=live)
            gradient -= rounded.to(tl.float32)
    if tokens.counts_N is not None:
        # Wait for the other threads, which may have written the zeros at the candidates' columns.
        tl.debug_barrier()
        for begin in range(0, tl.load(tokens.counts_N + n), BLOCK):
            column, live = candidates(begin, n, first, width, tokens, BLOCK)
            gradient = product_gradient(row, column, live, (n, first), tokens, scores)
            for part in range(parts):
                rounded = gradient.to(gradient_QP.dtype.element_ty)
                tl.store(out + part * N * wide + column, rounded, mask=live)
                gradient -= rounded.to(tl.float32)


@triton.jit
def candidates(begin, n, first, width, tokens, BLOCK: tl.constexpr):
    """The logit columns of one block of a token's candidates, and a mask: True for columns in this piece of logits."""
    number = begin + tl.arange(0, BLOCK)
    listed = number < tl.load(tokens.counts_N + n)
    place = tl.load(tokens.starts_N + n) + number
    column = tl.load(tokens.candidates_M + place, mask=listed, other=-1) - first
    return column, listed & (column >= 0) & (column < width)


@triton.jit
def logits(row, column, live, first, tokens):
    """The logits of a block at temperature 1: soft_cap * tanh(scale * (product + bias) / soft_cap)."""
    y = tl.load(row + column, mask=live, other=0.0).to(tl.float32)
    if tokens.bias_V is not None:
        y += tl.load(tokens.bias_V + first + column, mask=live, other=0.0).to(tl.float32)
    y *= tokens.scale
    if tokens.soft_cap > 0:
        small = tl.exp(-2.0 * tl.abs(y) / tokens.soft_cap)
        y = tl.where(y < 0, -1.0, 1.0) * tokens.soft_cap * (1 - small) / (1 + small)
    return y


@triton.jit
def inverse_temperature(tokens, n):
    """The inverse temperature of token n."""
    inverse = 1.0
    if tokens.inverse_temperature_N is not None:
        inverse = tl.load(tokens.inverse_temperature_N + n)
    return inverse


@triton.jit
def add_logit(z, maximum, total, moment):
    """Add one logit to the softmax of each lane, with a single exponential."""
    # exp is 0 below -104, so the bound of -200 changes no result; it avoids 0 * inf. NaN is kept.
    below = tl.maximum(-tl.abs(z - maximum), -200.0, propagate_nan=tl.PropagateNan.ALL)
    weight = tl.exp(below)
    moment = tl.where(z > maximum, weight * (moment + below * total), moment + weight * below)
    total = tl.where(z > maximum, weight * total + 1, total + weight)
    return tl.maximum(maximum, z), total, moment


@triton.jit
def product_gradient(row, column, live, place, tokens, scores):
    """The gradient with respect to a block of products, by the formulas of `ChunkedHead`."""
    n, first = place
    normalisers_N, entropies_N, grad_logprobs_N, grad_entropies_N = scores
    grad_logprob, inverse = tl.load(grad_logprobs_N + n), inverse_temperature(tokens, n)
    y = logits(row, column, live, first, tokens)
    log_p = y * inverse - tl.load(normalisers_N + n)
    gradient = (log_p + tl.load(entropies_N + n)) * -tl.load(grad_entropies_N + n) - grad_logprob
    gradient *= tl.exp(log_p)
    gradient += tl.where(column == tl.load(tokens.targets_N + n) - first, grad_logprob, 0.0)
    gradient *= inverse * tokens.scale
    if tokens.soft_cap > 0:
        gradient *= 1 - (y / tokens.soft_cap) * (y / tokens.soft_cap)
    return gradient
