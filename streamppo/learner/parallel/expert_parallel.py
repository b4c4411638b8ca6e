"""Expert parallelism: tokens go to the ranks of their experts, and the results come back.

    pairs      each token with each of its k experts, ordered by the rank of the expert
    forward    a rank's experts compute the pairs of all ranks; each pair is passed as a token with one expert
    return     a token's k results are summed on the token's rank

The ranks of a group may pass different rows of different widths. Tokens are dispatched as in GShard,
https://arxiv.org/abs/2006.16668, but without a capacity: no token is left out. If a rank would get more than `FEW`
pairs and more than `UNEVEN` times its even share, the ranks exchange their pairs in rounds. The backward pass computes
each round again, so a rank holds the activations of only one round.

N tokens of a rank, D width, M = N * k pairs, P pairs that a rank receives, R ranks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, each token's experts, the experts' weights) -> the weighted sum of the experts' outputs for each token."""
UNEVEN = 1.5
"""Maximum number of pairs that a rank gets in one round, as a multiple of its share in an even division."""
FEW = 4096
"""Up to this many pairs, a rank gets all its pairs in one round."""


class Round(NamedTuple):
    """The pairs of one exchange, ordered by their expert's rank: number, token, and the expert's index on that rank.

    `received` and `sent` are the numbers of pairs from and to each rank.
    """

    order_M: Tensor
    token_M: Tensor
    expert_M: Tensor
    received: list[int]
    sent: list[int]


def dispatch_to_experts(
    compute: Compute, group: dist.ProcessGroup, experts: int, hidden_ND: Tensor, index_Nk: Tensor, weights_Nk: Tensor
) -> Tensor:
    """Compute each token by its experts; every rank of `group` has `experts` consecutive experts. A collective."""
    rounds = _rounds(group, experts, index_Nk)
    if len(rounds) == 1:
        output_MD = _exchange(compute, group, hidden_ND, weights_Nk, rounds[0])
    else:
        run = partial(checkpoint, _exchange, compute, group, use_reentrant=False, preserve_rng_state=False)
        # No early stop: all ranks must recompute the returning exchange, or none, because it is a collective.
        with set_checkpoint_early_stop(False):
            output_MD = torch.cat([run(hidden_ND, weights_Nk, exchange_round) for exchange_round in rounds])
    order_M = torch.cat([exchange_round.order_M for exchange_round in rounds])
    return output_MD[order_M.argsort()].view(*index_Nk.shape, -1).sum(1)


def _rounds(group: dist.ProcessGroup, experts: int, index_Nk: Tensor) -> list[Round]:
    """Divide a rank's pairs into rounds; all ranks of `group` get equally many rounds. A collective."""
    ranks, rank, index_M = dist.get_world_size(group), dist.get_rank(group), index_Nk.flatten()
    rank_M = index_M // experts
    order_M, sent_R = rank_M.argsort(stable=True), rank_M.bincount(minlength=ranks)
    counts = [torch.empty_like(sent_R) for _ in range(ranks)]
    dist.all_gather(counts, sent_R, group=group)
    # Entry [r][s] is the number of pairs that rank r sends to rank s.
    sent_RR: list[list[int]] = torch.stack(counts).tolist()
    received = [sum(column) for column in zip(*sent_RR, strict=True)]
    number = max(1, math.ceil(max(received) / max(FEW, UNEVEN * sum(received) / ranks)))
    parts = [[_parts(pairs, number) for pairs in row] for row in sent_RR]
    for_rank = order_M.split(sent_RR[rank])
    divided = [pairs_M.split(sizes) for pairs_M, sizes in zip(for_rank, parts[rank], strict=True)]
    rounds: list[Round] = []
    for n in range(number):
        pairs_M = torch.cat([part[n] for part in divided])
        num_received, num_sent = [row[rank][n] for row in parts], [sizes[n] for sizes in parts[rank]]
        rounds.append(Round(pairs_M, pairs_M // index_Nk.shape[1], index_M[pairs_M] % experts, num_received, num_sent))
    return rounds


def _parts(pairs: int, number: int) -> list[int]:
    return [pairs * (n + 1) // number - pairs * n // number for n in range(number)]


def _exchange(
    compute: Compute, group: dist.ProcessGroup, hidden_ND: Tensor, weights_Nk: Tensor, exchange: Round
) -> Tensor:
    def send(tensor: Tensor) -> Tensor:
        return _ExchangeTokens.apply(tensor, group, exchange.received, exchange.sent)  # pyright: ignore[reportReturnType]

    hidden_PD, expert_P = send(hidden_ND[exchange.token_M]), send(exchange.expert_M)
    weights_P = send(weights_Nk.flatten()[exchange.order_M])
    if not len(hidden_PD):
        # A zero row gives unused weights a gradient too, because all ranks must reduce the same tensors.
        columns = hidden_PD, expert_P, weights_P
        hidden_PD, expert_P, weights_P = (torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) for rows in columns)
    output_PD = compute(hidden_PD, expert_P[:, None], weights_P[:, None])[: sum(exchange.received)]
    return _ExchangeTokens.apply(output_PD, group, exchange.sent, exchange.received)  # pyright: ignore[reportReturnType]


class _ExchangeTokens(torch.autograd.Function):
    """Send `num_sent[r]` rows to every rank r, and receive `num_received[r]` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, num_received: list[int], num_sent: list[int]
    ) -> Tensor:
        ctx.exchange = group, num_sent, num_received
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return _ExchangeTokens.apply(gradient, *ctx.exchange), None, None, None  # pyright: ignore
