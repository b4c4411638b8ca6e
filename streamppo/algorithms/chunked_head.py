"""Log-probs and entropy from hidden states, forward and backward, without holding the [N, V] logits.

N tokens, D hidden size, V vocabulary, C tokens in one chunk. The forward pass keeps two numbers per token, the
log-normaliser and the entropy. The backward pass recomputes each chunk's logits.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from streamppo.algorithms.candidates import Candidates

log = logging.getLogger(__name__)


class Products(NamedTuple):
    """The function `multiply` for the head's matrix products; both of its factors have the weight's dtype.

    The backward pass splits each float32 gradient of a logit into `parts` numbers of that dtype, multiplies each part,
    and adds the products. Two bfloat16 numbers keep 16 of the 24 bits of a float32, one keeps 8.
    """

    multiply: Callable[[Tensor, Tensor], Tensor]
    parts: int


PLAIN = Products(torch.matmul, parts=1)
WIDE = Products(partial(torch.mm, out_dtype=torch.float32), parts=2)
"""GPU tensor cores multiply 16-bit factors, and sum and return the products in float32; not available on a CPU."""


class LogitShape(NamedTuple):
    """The map from products (with bias) to logits: soft_cap * tanh(scale * product / soft_cap); 0 means no cap."""

    scale: float = 1.0
    soft_cap: float = 0.0


IDENTITY = LogitShape()
PIECE = 3 * 2**26
"""The number of logits that `FusedHead` holds at one time; with their gradients they take 1.5 GiB."""


class Extent(NamedTuple):
    """How a head computes logits: tokens per chunk, the tokens' candidates, matrix products, and the map to logits."""

    chunk: int
    candidates: Candidates | None
    products: Products = PLAIN
    shape: LogitShape = IDENTITY


class HeadContext(FunctionCtx):
    """The context that carries tensors from a head's forward pass to its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    extent: Extent


class ChunkedHead(torch.autograd.Function):
    """(logprobs_N, entropy_N), computed from the tokens' logits z, one chunk of tokens at a time.

        y        = scale * (hidden @ weight.T + bias)
        z        = soft_cap * tanh(y / soft_cap) * inverse_temperature
        log_p    = z - logsumexp(z)
        logprob  = log_p[target]
        entropy  = -sum_k(p_k * log_p_k)

        d logprob / d z_k = (1 if k == target else 0) - p_k
        d entropy / d z_k = -p_k * (log_p_k + entropy)
        d z_k / d y_k     = (1 - tanh(y_k / soft_cap)^2) * inverse_temperature

    With candidates, z_k is -inf for all other tokens, so p_k and its gradient are 0 there. A token that is its only
    candidate has log-prob 0 and no gradient. Autocast is disabled, because it would round the logits to bfloat16.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: HeadContext,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_temperature_N: Tensor | None,
        extent: Extent,
    ) -> tuple[Tensor, Tensor]:
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part in slices(hidden_ND.shape[0], extent.chunk):
                logits_CV = chunk_logits(hidden_ND[part], weight_VD, bias_V, extent)
                logits_CV = tempered(logits_CV, at(inverse_temperature_N, part))
                outside_CV = mask_logits(logits_CV, extent.candidates, part)
                normaliser_C = logits_CV.logsumexp(-1)
                logprobs_C = logits_CV.gather(-1, targets_N[part, None]).squeeze(-1) - normaliser_C
                logits_CV -= normaliser_C[:, None]
                p_CV = logits_CV.exp()
                if outside_CV is not None:
                    logits_CV.masked_fill_(outside_CV, 0.0)
                entropy_C = -torch.einsum("cv,cv->c", p_CV, logits_CV)
                rows.append((logprobs_C, entropy_C, normaliser_C))
        logprobs_N, entropy_N, normaliser_N = (torch.cat(column) for column in zip(*rows, strict=True))
        saved = (hidden_ND, weight_VD, bias_V, targets_N, inverse_temperature_N, normaliser_N, entropy_N)
        ctx.save_for_backward(*saved)  # pyright: ignore[reportArgumentType]
        ctx.extent = extent
        return logprobs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: HeadContext, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, inverse_temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        products, shape = ctx.extent.products, ctx.extent.shape
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_N.dtype) if wants_weight else None
        grad_bias_V = normaliser_N.new_zeros(len(weight_VD)) if wants_bias else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part in slices(hidden_ND.shape[0], ctx.extent.chunk):
                inverse_C = at(inverse_temperature_N, part)
                logits_CV = chunk_logits(hidden_ND[part], weight_VD, bias_V, ctx.extent)
                slope_CV = (logits_CV / shape.soft_cap).square_().neg_().add_(1) if shape.soft_cap else None
                log_p_CV = tempered(logits_CV, inverse_C)
                outside_CV = mask_logits(log_p_CV, ctx.extent.candidates, part)
                log_p_CV -= normaliser_N[part, None]
                p_CV = log_p_CV.exp()
                if outside_CV is not None:
                    log_p_CV.masked_fill_(outside_CV, 0.0)
                grad_CV = log_p_CV.add_(entropy_N[part, None]).mul_(-grad_entropy_N[part, None])
                grad_CV = grad_CV.sub_(grad_logprobs_N[part, None]).mul_(p_CV)
                grad_CV.scatter_add_(-1, targets_N[part, None], grad_logprobs_N[part, None])
                if inverse_C is not None:
                    grad_CV.mul_(inverse_C[:, None])
                if slope_CV is not None:
                    grad_CV.mul_(slope_CV)
                if shape.scale != 1:
                    grad_CV.mul_(shape.scale)
                if grad_bias_V is not None:
                    grad_bias_V += grad_CV.sum(0)
                factors = split(grad_CV, weight_VD.dtype, products.parts)
                if grad_hidden_ND is not None:
                    grad_hidden_ND[part] = sum_products(products, factors, weight_VD).to(hidden_ND.dtype)
                if grad_weight_VD is not None:
                    add_products(grad_weight_VD, factors, hidden_ND[part].to(weight_VD.dtype), products)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None


class FusedHead(torch.autograd.Function):
    """`ChunkedHead` on a GPU, with one pass over the logits instead of one pass per operation (head_kernels.py).

    P vocabulary entries in one piece, for all N tokens; Q = parts * N.

        forward    logits_NP = hidden_ND @ weight_PD.T  -> read    maximum, sums and target's logit so far
        backward   logits_NP = hidden_ND @ weight_PD.T  -> write   gradient_QP -> its products, and the next piece

    A piece covers all tokens, so each row of the weight's gradient is written once. The softmax is computed online,
    piece by piece: https://arxiv.org/abs/1805.02867.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: HeadContext,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_temperature_N: Tensor | None,
        extent: Extent,
    ) -> tuple[Tensor, Tensor]:
        from streamppo.algorithms import head_kernels

        tokens = head_kernels.tokens(extent.shape, bias_V, targets_N, inverse_temperature_N, extent.candidates)
        softmax_4N = head_kernels.softmax(hidden_ND)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            right_ND = hidden_ND.to(weight_VD.dtype)
            for piece in pieces(len(hidden_ND), len(weight_VD)):
                logits_NP = extent.products.multiply(right_ND, weight_VD[piece].T)
                head_kernels.read(logits_NP, piece.start, tokens, softmax_4N)
                del logits_NP
        maximum_N, total_N, moment_N, score_N = softmax_4N
        normaliser_N, entropy_N = maximum_N + total_N.log(), total_N.log() - moment_N / total_N
        saved = (hidden_ND, weight_VD, bias_V, targets_N, inverse_temperature_N, normaliser_N, entropy_N)
        ctx.save_for_backward(*saved)  # pyright: ignore[reportArgumentType]
        ctx.extent = extent
        return score_N - maximum_N - total_N.log(), entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: HeadContext, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        from streamppo.algorithms import head_kernels

        hidden_ND, weight_VD, bias_V, targets_N, inverse_temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        extent, (multiply, parts) = ctx.extent, ctx.extent.products
        tokens = head_kernels.tokens(extent.shape, bias_V, targets_N, inverse_temperature_N, extent.candidates)
        scores = (normaliser_N, entropy_N, grad_logprobs_N.contiguous(), grad_entropy_N.contiguous())
        # The gradients of the hidden states and of the weight are summed in float32.
        add = WIDE.multiply if weight_VD.dtype.itemsize == 2 else multiply
        rows = pieces(len(hidden_ND), len(weight_VD))
        gradient_QP = weight_VD.new_empty((parts * len(hidden_ND), -(-rows[0].stop // 128) * 128))
        grad_hidden_QD = hidden_ND.new_zeros((len(gradient_QP), hidden_ND.shape[1]), dtype=torch.float32)
        grad_weight_VD = torch.empty_like(weight_VD) if wants_weight else None
        grad_bias_V = torch.empty_like(bias_V) if wants_bias else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            right_QD = hidden_ND.to(weight_VD.dtype).repeat(parts, 1)
            for piece in rows:
                written_QP = gradient_QP[:, : piece.stop - piece.start]
                logits_NP = multiply(right_QD[: len(hidden_ND)], weight_VD[piece].T)
                head_kernels.write(logits_NP, piece.start, tokens, scores, written_QP)
                del logits_NP
                if wants_hidden:
                    grad_hidden_QD += add(written_QP, weight_VD[piece])
                if grad_weight_VD is not None:
                    grad_weight_VD[piece] = add(written_QP.T, right_QD)
                if grad_bias_V is not None:
                    grad_bias_V[piece] = written_QP.sum(0, dtype=torch.float32)
        grad_hidden_ND = grad_hidden_QD.view(parts, *hidden_ND.shape).sum(0).to(hidden_ND.dtype)
        return grad_hidden_ND if wants_hidden else None, grad_weight_VD, grad_bias_V, None, None, None


def mask_logits(logits_CV: Tensor, candidates: Candidates | None, part: slice) -> Tensor | None:
    """Set the logits outside of each token's candidates to -inf, in place, and return their mask, [C, V], or None."""
    if candidates is None:
        return None
    outside_CV = candidates.at(part).outside(logits_CV.shape[1])
    logits_CV.masked_fill_(outside_CV, -torch.inf)
    return outside_CV


def split(gradient_CV: Tensor, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """Return `parts` tensors of `dtype` whose sum is `gradient_CV`, rounding the remainder each time; overwrites it."""
    terms = [gradient_CV.to(dtype)]
    for _ in range(1, parts):
        terms.append(gradient_CV.sub_(terms[-1]).to(dtype))
    return terms


def sum_products(products: Products, factors: list[Tensor], right_VD: Tensor) -> Tensor:
    """Return (sum of `factors`) @ `right_VD`."""
    total_CD = products.multiply(factors[0], right_VD)
    for factor_CV in factors[1:]:
        total_CD += products.multiply(factor_CV, right_VD)
    return total_CD


def add_products(total_VD: Tensor, factors: list[Tensor], right_CD: Tensor, products: Products) -> None:
    """Compute total += (sum of `factors`, each [C, V]).T @ right in total's dtype; in place if the dtypes agree."""
    for factor_CV in factors:
        if total_VD.dtype == factor_CV.dtype:
            total_VD.addmm_(factor_CV.T, right_CD)
        else:
            total_VD.add_(products.multiply(factor_CV.T, right_CD))


def slices(total: int, chunk: int) -> list[slice]:
    """Split range(total) into runs of at most `chunk`; if total is 0, one empty run."""
    return [slice(start, min(start + chunk, total)) for start in range(0, max(total, 1), chunk)]


def pieces(tokens: int, vocabulary: int) -> list[slice]:
    """Split the vocabulary into runs with about `PIECE` logits of all `tokens` together.

    The width of all runs except the last is a multiple of 128, for which matrix products are fast.
    """
    count = -(-tokens * vocabulary // PIECE)
    return slices(vocabulary, -(-vocabulary // (max(count, 1) * 128)) * 128)


def at(inverse_temperature_N: Tensor | None, part: slice) -> Tensor | None:
    """The inverse temperatures of the tokens in `part`; None if all temperatures are 1."""
    return None if inverse_temperature_N is None else inverse_temperature_N[part]


def chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, extent: Extent) -> Tensor:
    """[C, V] logits at temperature 1, computed with `extent.products`, in float32 or, for a float64 weight, float64."""
    logits_CV = extent.products.multiply(hidden_CD.to(weight_VD.dtype), weight_VD.T)
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    if bias_V is not None:
        logits_CV += bias_V
    if extent.shape.scale != 1:
        logits_CV *= extent.shape.scale
    if cap := extent.shape.soft_cap:
        logits_CV.div_(cap).tanh_().mul_(cap)
    return logits_CV


def tempered(logits_CV: Tensor, inverse_temperature_C: Tensor | None) -> Tensor:
    """The logits divided by the temperatures of their tokens."""
    return logits_CV if inverse_temperature_C is None else logits_CV * inverse_temperature_C[:, None]


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the Triton kernels run on `device` for a head of `dtype`. If a GPU cannot run them, logs the reason."""
    if device.type != "cuda":
        return False
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        fault = f"they compute in float32, and the head is of {dtype}"
    else:
        try:
            from streamppo.algorithms import head_kernels
        except ImportError as error:
            fault = str(error)
        else:
            fault = head_kernels.fault(device, dtype)
    if fault:
        log.warning(f"the head's kernels do not run; the fallback is slower and takes more memory: {fault}")
    return not fault


def has_wide_products(hidden: Tensor, weight: Tensor) -> bool:
    """True if both tensors are on a GPU in the same 16-bit dtype: tensor cores sum their products in float32."""
    return hidden.is_cuda and hidden.dtype == weight.dtype and weight.dtype in (torch.bfloat16, torch.float16)


def chunked_logprobs_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int = 1024,
    float32_matmul: bool = True,
    candidates: Candidates | None = None,
    bias_V: Tensor | None = None,
    shape: LogitShape = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) of a linear head, differentiable in hidden, weight and bias.

        logprobs = log_softmax(shape(hidden @ weight.T + bias) / temperature)[target]

    With `candidates` [N], the distribution is over the candidates, which must include the target. `temperature` is a
    number or [N]. Every target, masked or not, must be a token id in [0, V). Memory is saved as in Cut Cross-Entropy,
    https://arxiv.org/abs/2411.09009. With chunk >= N this is the plain formula.

    Without float32_matmul, products are in the weight's dtype. With float32_matmul, products have float32 precision and
    agree best with an engine. For this, hidden and weight are cast to float32 (one copy of the weight). On a GPU,
    16-bit tensors are not cast: their products fit into float32, and are summed in float32. In the backward pass, the
    float32 gradient of the logits is multiplied as a sum of two 16-bit numbers (relative error 2^-17). One 16-bit
    number is not enough: a token's gradients cancel on the common mean of the weight's rows, and rounding errors of
    2^-9 do not cancel.
    """
    N, D = hidden_ND.shape
    if weight_VD.dim() != 2 or weight_VD.shape[1] != D or targets_N.shape != (N,):
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)}, weight {tuple(weight_VD.shape)} and targets "
            f"{tuple(targets_N.shape)} must be [N, D], [V, D] and [N]"
        )
    products = WIDE if float32_matmul and has_wide_products(hidden_ND, weight_VD) else PLAIN
    if float32_matmul and products is PLAIN and weight_VD.dtype != torch.float64:
        hidden_ND, weight_VD = hidden_ND.float(), weight_VD.float()
    wide = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
    inverse_temperature_N = None
    if isinstance(temperature, Tensor) or temperature != 1:
        # `torch.full` on the device: torch.tensor(number) would copy from the host and synchronise with the GPU.
        temperature_ = (
            temperature
            if isinstance(temperature, Tensor)
            else torch.full((), temperature, dtype=wide, device=hidden_ND.device)
        )
        temperature_ = temperature_.to(hidden_ND.device, wide)
        inverse_temperature_N = temperature_.reciprocal().expand(N)
    extent = Extent(chunk, candidates, products, shape)
    arguments = (hidden_ND, weight_VD, bias_V, targets_N, inverse_temperature_N, extent)
    head = FusedHead if has_kernels(weight_VD.device, weight_VD.dtype) else ChunkedHead
    return cast(tuple[Tensor, Tensor], head.apply(*arguments))  # pyright: ignore[reportUnknownMemberType]
