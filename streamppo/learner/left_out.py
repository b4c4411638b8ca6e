"""Shares of tokens and responses that filters and the correction leave out of the policy's loss.

b rows of a micro-batch, T completion tokens (padded), N rules.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.learner.device import add_up
from streamppo.learner.metrics import Minibatch


def left_out_shares(
    names_N: Sequence[str], minibatches: Iterable[Minibatch], mask_BT: Tensor, group: dist.ProcessGroup
) -> dict[str, float]:
    """By rule, the share of sampled tokens, and with `_responses` behind its name of responses that lost a token.

    Over all passes of the policy's loss; 0 where there was none. Each rule is counted by itself: a token may be left
    out by several. A collective, unless there is no rule.
    """
    if not names_N:
        return {}
    counts_NC = torch.zeros(len(names_N) + 1, 2, dtype=torch.float64, device=mask_BT.device)
    for one in (one for minibatch in minibatches for one in minibatch.passes):
        mask_bT = mask_BT[one.rows]
        counts_NC[0] += torch.stack([mask_bT.sum(), mask_bT.any(-1).sum()])
        for place, name in enumerate(names_N, start=1):
            left_out_bT = one.left_out[name]
            counts_NC[place] += torch.stack([left_out_bT.sum(), left_out_bT.any(-1).sum()])
    add_up(counts_NC, group)
    all_C, *left_out = counts_NC.tolist()
    shares: dict[str, float] = {}
    for name, left_C in zip(names_N, left_out, strict=True):
        shares[name], shares[f"{name}_responses"] = (x / max(1.0, y) for x, y in zip(left_C, all_C, strict=True))
    return shares
