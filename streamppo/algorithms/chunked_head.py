"""Log-probs and entropy from hidden states: the [N, V] logits are never held whole, forward or backward.

N tokens, D hidden size, V vocabulary, C tokens in one chunk. The forward pass keeps two numbers per token
(the log-normaliser and the entropy); the backward pass recomputes each chunk's logits. Peak extra memory is a
few [C, V] float32 tensors, plus the weight's own gradient.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from streamppo.algorithms.candidates import Candidates


class Extent(NamedTuple):
    """Tokens whose logits exist at one time, and the candidates that these are cut to."""

    chunk: int
    candidates: Candidates | None


class HeadContext(FunctionCtx):
    """Carries tensors from the forward pass of `ChunkedHead` to its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    extent: Extent


class ChunkedHead(torch.autograd.Function):
    """(logprobs_N, entropy_N) of a token's logits z, one chunk of tokens at a time.

        z        = hidden @ weight.T * inverse_temperature
        log_p    = z - logsumexp(z)
        logprob  = log_p[target]
        entropy  = -sum_k(p_k * log_p_k)

        d logprob / d z_k = (1 if k == target else 0) - p_k
        d entropy / d z_k = -p_k * (log_p_k + entropy)

    With candidates, z_k is -inf for every other token, so that p_k is 0 there, and so is its gradient. A token that had
    no alternative has log-prob 0 and no gradient. Autocast stays outside: it would round the logits to bfloat16.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: HeadContext,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        inverse_temperature_N: Tensor,
        extent: Extent,
    ) -> tuple[Tensor, Tensor]:
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part in slices(hidden_ND.shape[0], extent.chunk):
                logits_CV = chunk_logits(hidden_ND[part], weight_VD, inverse_temperature_N[part])
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
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, inverse_temperature_N, normaliser_N, entropy_N)
        ctx.extent = extent
        return logprobs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: HeadContext, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, inverse_temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normaliser_N.dtype) if wants_weight else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part in slices(hidden_ND.shape[0], ctx.extent.chunk):
                log_p_CV = chunk_logits(hidden_ND[part], weight_VD, inverse_temperature_N[part])
                outside_CV = mask_logits(log_p_CV, ctx.extent.candidates, part)
                log_p_CV -= normaliser_N[part, None]
                p_CV = log_p_CV.exp()
                if outside_CV is not None:
                    log_p_CV.masked_fill_(outside_CV, 0.0)
                grad_CV = log_p_CV.add_(entropy_N[part, None]).mul_(-grad_entropy_N[part, None])
                grad_CV = grad_CV.sub_(grad_logprobs_N[part, None]).mul_(p_CV)
                grad_CV.scatter_add_(-1, targets_N[part, None], grad_logprobs_N[part, None])
                grad_CV = grad_CV.mul_(inverse_temperature_N[part, None]).to(weight_VD.dtype)
                if grad_hidden_ND is not None:
                    grad_hidden_ND[part] = (grad_CV @ weight_VD).to(hidden_ND.dtype)
                if grad_weight_VD is not None:
                    add_product(grad_weight_VD, grad_CV.T, hidden_ND[part].to(weight_VD.dtype))
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, None, None, None


def mask_logits(logits_CV: Tensor, candidates: Candidates | None, part: slice) -> Tensor | None:
    """Set the logits of the tokens `part` to -inf outside of their candidates, in place. Returns the places, [C, V]."""
    if candidates is None:
        return None
    outside_CV = candidates.at(part).outside(logits_CV.shape[1])
    logits_CV.masked_fill_(outside_CV, -torch.inf)
    return outside_CV


def add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """total += left @ right, summed in total's type: in place where the types agree."""
    if total_VD.dtype == left_VC.dtype:
        total_VD.addmm_(left_VC, right_CD)
    else:
        total_VD.add_(left_VC @ right_CD)


def slices(total: int, chunk: int) -> list[slice]:
    """Cut range(total) into runs of at most `chunk`; one empty run where there is nothing."""
    return [slice(start, min(start + chunk, total)) for start in range(0, max(total, 1), chunk)]


def chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, inverse_temperature_C: Tensor) -> Tensor:
    """[C, V] float32 (float64 stays): the product in the weight's own type, the rest in float32."""
    logits_CV = hidden_CD.to(weight_VD.dtype) @ weight_VD.T
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    return logits_CV * inverse_temperature_C[:, None]


def chunked_logprobs_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int = 1024,
    float32_matmul: bool = True,
    candidates: Candidates | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N) of a linear head, differentiable in hidden and weight.

        logprobs = log_softmax(hidden @ weight.T / temperature)[target]

    Entropy is that of the full distribution. With `candidates` [N], log-probs and entropy are of the distribution
    over these alone, and every target must be one of its own. `temperature` is the one the tokens were sampled at, a
    number or [N]. float32_matmul casts hidden and weight to float32 first (one copy of the weight, the closest
    agreement with an engine); without it the product runs in the weight's type. Autocast does not reach inside. Every
    target, masked or not, must be a token id in [0, V). Raises ValueError on shapes that do not
    fit. Memory as in Cut Cross-Entropy, https://arxiv.org/abs/2411.09009. With chunk >= N this is
    the plain formula.
    """
    N, D = hidden_ND.shape
    if weight_VD.dim() != 2 or weight_VD.shape[1] != D or targets_N.shape != (N,):
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)}, weight {tuple(weight_VD.shape)} and targets "
            f"{tuple(targets_N.shape)} must be [N, D], [V, D] and [N]"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if float32_matmul and weight_VD.dtype != torch.float64:
        hidden_ND, weight_VD = hidden_ND.float(), weight_VD.float()
    wide = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
    if bool(torch.as_tensor(temperature <= 0).any()):
        raise ValueError("temperature must be positive (greedy sampling has no log-probs to learn from)")
    temperature_ = torch.as_tensor(temperature, dtype=wide, device=hidden_ND.device)
    inverse_temperature_N = temperature_.reciprocal().expand(N)
    arguments = (hidden_ND, weight_VD, targets_N, inverse_temperature_N, Extent(chunk, candidates))
    return cast(tuple[Tensor, Tensor], ChunkedHead.apply(*arguments))  # pyright: ignore[reportUnknownMemberType]
