"""The head of a causal LM as the learner computes it, and a comparison with the model's own.

    products of hidden states and weights  + bias  * scale  -> soft cap  -> logits

A model says by its settings what it does; one that does yet more is refused when it is loaded.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.algorithms.chunked_head import Extent, Shape, chunk_logits
from streamppo.errors import ModelError
from streamppo.tasks import tokenizer

UNSAMPLED = -1e9
"""A bias with which a token has no probability; no product of it with 0 is NaN."""
GAP, PROBED = 1e-3, 4
"""Nats between a model's log-probs and the learner's in float32, and the tokens on which they are compared."""


def shape_of(lm: Any) -> Shape:
    """The way to its logits by a model's settings, whose names its family has chosen.

    Gemma: `final_logit_softcapping`; Granite: divided by `logits_scaling`; Cohere: times `logit_scale`; Falcon-H1:
    times `lm_head_multiplier`.
    """
    settings: Any = lm.config.get_text_config()
    scale = getattr(settings, "logit_scale", None) or getattr(settings, "lm_head_multiplier", None) or 1.0
    divisor = getattr(settings, "logits_scaling", None) or 1.0
    return Shape(float(scale) / float(divisor), float(getattr(settings, "final_logit_softcapping", None) or 0.0))


def bias_of(lm: Any, unknown_V: Tensor | None = None) -> Tensor | None:
    """The bias of a model's head, [V], with that of tokens which are never sampled."""
    bias_V = getattr(lm.get_output_embeddings(), "bias", None)
    if bias_V is None or unknown_V is None:
        return unknown_V if bias_V is None else bias_V
    return bias_V + unknown_V


def unknown(path: str | Path, rows: int, device: str) -> Tensor | None:
    """A bias [V] that takes the rows of a head out of its distribution that are no tokens of the tokenizer at `path`.

    Rank 0 reads the tokenizer. A collective. None if it has them all, or if there is none. With a soft cap the bias
    takes them down to the cap.
    """
    bias_V = torch.zeros(rows, device=device)
    if dist.get_rank() == 0:
        bias_V[list(tokenizer.unknown(path, rows))] = UNSAMPLED
    dist.broadcast(bias_V, src=0)
    return bias_V if bool(bias_V.any()) else None


@torch.no_grad()
def check(lm: Any, path: str | Path) -> None:
    """Compare log-probs of a few tokens with the model's own. Raises `ModelError` where they are others."""
    head_VD = lm.get_output_embeddings().weight
    tokens_1L = torch.arange(PROBED)[None] % len(head_VD)
    theirs_1LV = lm(tokens_1L).logits.float().log_softmax(-1)
    hidden_LD = lm.base_model(tokens_1L).last_hidden_state[0]
    ours_LV = chunk_logits(hidden_LD, head_VD, bias_of(lm), Extent(PROBED, None, shape=shape_of(lm)))
    gap = (ours_LV.log_softmax(-1) - theirs_1LV[0]).abs().max().item()
    # A NaN is above no bound.
    if not gap <= GAP:
        raise ModelError(
            f"the model {str(path)!r} does more to its logits than the learner knows (products with its head's "
            f"weights, a bias, a scale, a soft cap): the learner's log-probs would be up to {gap:.2g} nats from its own"
        )
