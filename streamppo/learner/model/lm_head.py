"""The head of a causal LM as the learner computes it, and its comparison with the model's own computation.

    hidden states @ weights.T  -> + bias  -> * scale  -> soft cap  -> logits

Scale and soft cap are read from the model's config. At load, `check` rejects a model whose logits differ from these.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.algorithms.chunked_head import Extent, LogitShape, chunk_logits
from streamppo.errors import ModelError
from streamppo.tasks import tokenizer

UNSAMPLED = -1e9
"""A bias that gives a token probability 0; finite, because the product of infinity and 0 is NaN."""
GAP, PROBED = 1e-3, 4
"""The largest accepted difference between the model's and the learner's log-probs, in nats, on `PROBED` tokens."""


def shape_of(lm: Any) -> LogitShape:
    """The logit scale and soft cap in the model's config, under the field names of its family."""
    settings: Any = lm.config.get_text_config()
    scale = getattr(settings, "logit_scale", None) or getattr(settings, "lm_head_multiplier", None) or 1.0
    divisor = getattr(settings, "logits_scaling", None) or 1.0
    return LogitShape(float(scale) / float(divisor), float(getattr(settings, "final_logit_softcapping", None) or 0.0))


def bias_of(lm: Any, unknown_V: Tensor | None = None) -> Tensor | None:
    """The bias [V] of a model's head plus `unknown_V`, which excludes tokens from sampling; None if neither exists."""
    bias_V = getattr(lm.get_output_embeddings(), "bias", None)
    if bias_V is None or unknown_V is None:
        return unknown_V if bias_V is None else bias_V
    return bias_V + unknown_V


def unknown_bias(path: str | Path, rows: int, device: str) -> Tensor | None:
    """A bias [V] that gives probability 0 to head rows without a token of the tokenizer at `path`. A collective.

    Rank 0 reads the tokenizer. The bias is None if all rows are tokens, or if there is no tokenizer. Under a soft cap
    the bias lowers these rows' logits only to the cap.
    """
    bias_V = torch.zeros(rows, device=device)
    if dist.get_rank() == 0:
        bias_V[list(tokenizer.unknown_ids(path, rows))] = UNSAMPLED
    dist.broadcast(bias_V, src=0)
    return bias_V if bool(bias_V.any()) else None


@torch.no_grad()
def check(lm: Any, path: str | Path) -> None:
    """Compare the learner's log-probs of a few tokens with the model's; raise `ModelError` if a gap exceeds `GAP`."""
    if lm.base_model is lm:
        raise ModelError(
            f"the model {str(path)!r} is a {lm.config.model_type}, whose head is not separate from its layers"
        )
    head_VD = lm.get_output_embeddings().weight
    tokens_1L = torch.arange(PROBED)[None] % len(head_VD)
    model_1LV = lm(tokens_1L, use_cache=False).logits.float().log_softmax(-1)
    hidden_LD = lm.base_model(tokens_1L, use_cache=False).last_hidden_state[0]
    head_LV = chunk_logits(hidden_LD, head_VD, bias_of(lm), Extent(PROBED, None, shape=shape_of(lm)))
    gap = (head_LV.log_softmax(-1) - model_1LV[0]).abs().max().item()
    # `gap > GAP` would be False for NaN.
    if not gap <= GAP:
        raise ModelError(
            f"the model {str(path)!r} computes logits from more than the head's weights, a bias, a scale and a soft "
            f"cap: the learner's log-probs would differ by up to {gap:.2g} nats"
        )
