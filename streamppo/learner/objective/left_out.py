"""Shares of tokens and responses that filters and the correction leave out of the policy's loss.

b rows of a micro-batch, T completion tokens (padded), N rules.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.device import add_up, to_device
from streamppo.learner.objective.build_correction import TRUNCATED
from streamppo.learner.objective.metrics import Minibatch


def dropped_shares(
    names_N: Sequence[str], minibatches: Sequence[Minibatch], batch: PaddedBatch, group: dist.ProcessGroup
) -> dict[str, float]:
    """The share of sampled tokens that each rule leaves out, and as `NAME_responses` of responses that lose a token.

    Shares are over all passes of the policy's loss; for truncated completions also over the idle rows, which have no
    pass. A share of nothing is 0. A token that several rules leave out counts for each. A collective, unless there is
    no rule.
    """
    if not names_N:
        return {}
    counts_NC = torch.zeros(len(names_N) + 1, 2, dtype=torch.float64, device=batch.mask_BT.device)
    for one in (one for minibatch in minibatches for one in minibatch.passes):
        counts_NC[0] += _counts(batch.mask_BT[one.rows])
        for place, name in enumerate(names_N, start=1):
            counts_NC[place] += _counts(one.left_out[name])
    add_up(counts_NC, group)
    shares: dict[str, float] = {}
    for name, left_C in zip(names_N, counts_NC[1:], strict=True):
        more_C, all_C = _idle_counts(minibatches, batch) if name == TRUNCATED else (0.0, 0.0)
        share_C = (left_C + more_C) / (counts_NC[0] + all_C).clamp(min=1.0)
        shares[name], shares[f"{name}_responses"] = share_C.tolist()
    return shares


def _counts(mask_bT: Tensor) -> Tensor:
    """The number of tokens, and of responses with at least one."""
    return torch.stack([mask_bT.sum(), mask_bT.any(-1).sum()])


def _idle_counts(minibatches: Iterable[Minibatch], batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """The counts of the idle rows that were truncated, and of all idle rows."""
    some = [one.idle for one in minibatches if one.part != "critic" and one.idle is not None]
    rows = to_device(torch.cat([torch.empty(0, dtype=torch.long), *some]), batch.mask_BT.device)
    mask_bT = batch.mask_BT[rows]
    return _counts(mask_bT & batch.truncated_B[rows][:, None]), _counts(mask_bT)
