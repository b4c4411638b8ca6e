"""The rows that an update passes through the model, divided into minibatches and each rank's micro-batches.

B trajectories of the batch. A minibatch is the rows of one step. The division depends on the seed, the version, the
epoch, rows' lengths and branches, and idle rows: a rank finds its rows before it fetches their tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from streamppo.algorithms.groups import zero_variance
from streamppo.config import algorithm as choices
from streamppo.config.correction import CustomCorrection
from streamppo.config.policy_loss import CustomLoss
from streamppo.config.queue import AdaptiveLag
from streamppo.config.regularisation import NoExploration
from streamppo.config.sections import Config
from streamppo.learner.attention.prefix_sharing import WORTH, work
from streamppo.learner.attention.tree import RowSizes
from streamppo.learner.batch.padded import PaddedBatch, SharedPrompts, row_order
from streamppo.learner.objective import build_correction
from streamppo.learner.objective.adaptation import is_lowered_by_ess
from streamppo.learner.objective.build_correction import TRUNCATED
from streamppo.learner.objective.objective import Epoch, trained_tokens

COMPARING = (choices.Grpo, choices.DrGrpo, choices.Rloo, choices.MaxRl)
"""Estimators that give advantage 0 to a group of equal rewards."""


class ActiveRows(NamedTuple):
    """[B] on the CPU: `trained_B` are passed in the steps, `scored_B` before the first step.

    `idle_B` have tokens in the loss but no gradient, and are not passed. A minibatch of idle rows makes a step.
    """

    trained_B: Tensor
    scored_B: Tensor
    idle_B: Tensor

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows among `rows` that are passed in the steps."""
        return rows[self.trained_B[rows]]


def active_rows(config: Config, batch: PaddedBatch) -> ActiveRows:
    """Find the rows of `batch` to pass: all rows with a gradient or, for the metrics, every row if none has a gradient.

    Rows have no gradient for two reasons:

        no token in the loss    all are too old, all rewards of the group are equal (zero_variance = "mask"), or the
                                completion is filtered
        only advantages of 0    all rewards of the group are equal (zero_variance = "keep"), and only advantages give a
                                gradient

    The result depends on no token, so every rank finds the same rows before it has the tokens.
    """
    # Other filters and rejections report their shares of all completions. If there are any, no filter is applied here,
    # and truncated completions are passed too.
    only_truncated = _filters_only_truncated(config.algorithm)
    algorithm = config.algorithm if only_truncated else structs.replace(config.algorithm, filters=())
    trained_B = trained_tokens(algorithm, batch).any(-1).cpu()
    every_B = torch.ones_like(trained_B)
    if is_lowered_by_ess(config) or isinstance(config.queue.max_lag, AdaptiveLag):
        return ActiveRows(every_B, every_B, ~every_B)
    idle_B = ~every_B
    if _has_only_advantage_gradients(config):
        idle_B = zero_variance(batch.reward_B, batch.prompt_B).cpu() & trained_B
    gradient_B = trained_B & ~idle_B
    if not gradient_B.any():
        return ActiveRows(every_B, every_B, ~every_B)
    return ActiveRows(gradient_B, every_B if _scores_all(config.algorithm) else gradient_B, idle_B)


def _scores_all(config: choices.Algorithm) -> bool:
    in_reward = config.kl.reward_beta > 0 or (config.teacher.on and config.teacher.signal == "reward")
    return config.has_critic or in_reward or isinstance(config.correction, CustomCorrection)


def _has_only_advantage_gradients(config: Config) -> bool:
    """True if a token with advantage 0 gives no gradient and has no influence on whether a step is made."""
    algorithm = config.algorithm
    return (
        isinstance(algorithm.advantage, COMPARING)
        and not (isinstance(algorithm.advantage, choices.DrGrpo) and algorithm.advantage.baseline_shift)
        and algorithm.whiten.over in ("auto", "off")
        and not isinstance(algorithm.policy_loss, CustomLoss)
        and isinstance(algorithm.exploration, NoExploration)
        and not (algorithm.entropy or algorithm.entropy_control.target)
        and not (algorithm.kl.on or algorithm.teacher.on or algorithm.positive_nll or algorithm.target_kl)
        and _filters_only_truncated(algorithm)
    )


def _filters_only_truncated(config: choices.Algorithm) -> bool:
    return all(rule == TRUNCATED for rule in build_correction.metrics(config.correction, config.filters))


class PassCosts(NamedTuple):
    """The fixed costs of a pass, in units of the layers' matrix products for one token.

    `gradients` is the cost of adding weight gradients to those of earlier passes, and `launches` / width^2 that of
    launching operations.
    """

    gradients: float
    launches: float


PADDING_SHARE = 1 / 16
"""By default, another micro-batch costs as much as padding of this share of the token budget."""
ON_CPU, ON_GPU = PassCosts(25, 5e5), PassCosts(250, 5e9)
"""`ON_CPU` is measured at widths of 64, 256 and 512. `ON_GPU` is computed for an H100 from 40 % of its peak, the speed
of its memory, and 10 microseconds per launch.
"""


class Division(NamedTuple):
    """Divides rows for `rank` of `ranks` and a model of width `hidden`; `is_padded`: the model's layout pads rows."""

    config: Config
    rank: int
    ranks: int
    hidden: int
    is_padded: bool
    costs: PassCosts

    @property
    def overhead(self) -> float | None:
        """The padding, in tokens, that costs as much as another micro-batch; None on several ranks: the default."""
        return None if self.ranks > 1 else self.costs.gradients + self.costs.launches / self.hidden**2

    def minibatches(self, num_rows: int, version: int, epoch: Epoch) -> tuple[Tensor, ...]:
        """Split the rows by seed, version and epoch alone; a single minibatch keeps the batch's order."""
        if epoch.minibatches == 1:
            return (torch.arange(num_rows),)
        return row_order(num_rows, self.config.seed, version, epoch.number).chunk(epoch.minibatches)

    def micro_batches(self, sizes: RowSizes, rows: Tensor) -> list[Tensor]:
        """This rank's micro-batches of `rows`. Every rank has equally many; some may be empty."""
        budget, costs = self.config.learner.micro_batch_tokens, partial(work, 1, hidden=self.hidden)
        tokens_B, prompts, lines_B = sizes
        if prompts is not None and self.config.environment is not None and not self.is_padded:
            # An environment may begin each sample of a prompt with other tokens, and a rank knows only its own rows'.
            prompts = prompts._replace(shared_B=torch.zeros_like(prompts.shared_B))
        options = {"padded": self.is_padded, "lines_B": lines_B, "prompts": prompts, "overhead": self.overhead}
        return micro_batches(rows, tokens_B, budget, self.ranks, work=costs, **options)[self.rank]

    def are_one_pass(self, sizes: RowSizes, pieces: Sequence[Tensor]) -> bool:
        """True if one micro-batch could hold this rank's `pieces`; on several ranks, if there is one piece."""
        if len(pieces) <= 1 or self.ranks > 1:
            return len(pieces) == 1
        tokens_B, _, lines_B = sizes
        lines_B = torch.ones_like(tokens_B) if lines_B is None else lines_B
        widths_B = (tokens_B[rows].max().expand(len(rows)) if self.is_padded else tokens_B[rows] for rows in pieces)
        tokens = sum(int((width_b * lines_B[rows]).sum()) for width_b, rows in zip(widths_B, pieces, strict=True))
        return tokens <= self.config.learner.micro_batch_tokens

    def rank_rows(self, sizes: RowSizes, version: int, epochs: Sequence[Epoch], active: ActiveRows) -> list[int]:
        """The rows whose tokens this rank reads in an update: the rows that it passes, and `STAND_IN`."""
        num_rows = len(sizes.tokens_B)
        passes = [active.scored_B.nonzero()[:, 0]]
        passes += [active.select(rows) for epoch in epochs for rows in self.minibatches(num_rows, version, epoch)]
        pieces = [piece for rows in passes for piece in self.micro_batches(sizes, rows)]
        return torch.cat([*pieces, STAND_IN]).unique().tolist()


STAND_IN = torch.tensor([0])
"""For an empty micro-batch this row is passed and its result ignored, because every pass is a collective."""


def micro_batches(
    rows: Tensor,
    tokens_B: Tensor,
    budget: int,
    ranks: int,
    *,
    padded: bool = True,
    work: Callable[[int], float] = float,
    lines_B: Tensor | None = None,
    prompts: SharedPrompts | None = None,
    overhead: float | None = None,
) -> list[list[Tensor]]:
    """Split `rows` into micro-batches of at most `budget` tokens; entry r is for rank r.

    `work` is a row's cost by its number of tokens. A row may have several lines, `lines_B`, each of at most `tokens_B`
    tokens. Every rank gets equally many micro-batches, as each is a collective; some are empty if rows run out. Rows
    are dealt longest first, each to the rank with the least work so far. A row longer than the budget is alone.

    If `padded`, a row counts as long as the longest of its micro-batch. Rows of different lengths are separated if that
    saves more padding than another micro-batch costs (`overhead`, in tokens), but not if one row for each prompt of
    `prompts` is less work. Otherwise the samples of a prompt are in as few micro-batches as possible, and each
    micro-batch computes the shared tokens of `prompts` once.
    """
    by_length = rows[torch.argsort(tokens_B[rows], descending=True, stable=True)]
    lines_B = torch.ones_like(tokens_B) if lines_B is None else lines_B
    by_rank = [by_length] if ranks == 1 else _deal(by_length, tokens_B, lines_B, ranks, work)
    if padded:
        costs = PaddingCosts(work, PADDING_SHARE * budget if overhead is None else overhead)
        shares = [_split_padded(rank_rows, tokens_B, lines_B, budget, prompts, costs) for rank_rows in by_rank]
    else:
        shares = [_split_joined(rank_rows, tokens_B, budget, prompts) for rank_rows in by_rank]
    num_batches = max(map(len, shares))
    return [share + [by_length[:0]] * (num_batches - len(share)) for share in shares]


def _deal(
    by_length: Tensor, tokens_B: Tensor, lines_B: Tensor, ranks: int, work: Callable[[int], float]
) -> list[Tensor]:
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    rows = zip(by_length.tolist(), tokens_B[by_length].tolist(), lines_B[by_length].tolist(), strict=True)
    for row, tokens, lines in rows:
        lightest = loads.index(min(loads))
        by_rank[lightest].append(row)
        loads[lightest] += lines * work(tokens)
    return [torch.tensor(rank_rows, dtype=torch.long) for rank_rows in by_rank]


class PaddingCosts(NamedTuple):
    """The cost `work` of a line, by its number of tokens, and of another micro-batch, `overhead`."""

    work: Callable[[int], float]
    overhead: float


def _split_padded(
    rows: Tensor, tokens_B: Tensor, lines_B: Tensor, budget: int, prompts: SharedPrompts | None, costs: PaddingCosts
) -> list[Tensor]:
    """Rows are sorted, longest first, so a micro-batch is as wide as its first row."""
    tokens, lines, start = tokens_B[rows].tolist(), lines_B[rows].tolist(), 0
    pieces: list[Tensor] = []
    while start < len(tokens):
        end, num_lines = start + 1, lines[start]
        while end < len(tokens) and (num_lines + lines[end]) * tokens[start] <= budget:
            num_lines += lines[end]
            end += 1
        pieces += _split_by_length(rows[start:end], tokens_B, lines_B, prompts, costs)
        start = end
    return pieces


def _split_by_length(
    rows: Tensor, tokens_B: Tensor, lines_B: Tensor, prompts: SharedPrompts | None, costs: PaddingCosts
) -> list[Tensor]:
    """Split one micro-batch by length, unless one row per prompt, with all its samples, is less work."""
    tokens, lines = tokens_B[rows].numpy(), lines_B[rows].numpy()
    pieces = _spans_of_similar(tokens, lines, costs.overhead)
    if len(pieces) > 1 and prompts is not None:
        separate_work = sum(costs.work(int(tokens[begin])) * int(lines[begin:end].sum()) for begin, end in pieces)
        separate_work += costs.overhead * (len(pieces) - 1)
        if _shared_work(rows, tokens_B, prompts, costs.work) <= WORTH * separate_work:
            return [rows]
    return [rows[begin:end] for begin, end in pieces]


def _spans_of_similar(tokens: np.ndarray, lines: np.ndarray, overhead: float) -> list[tuple[int, int]]:
    """(begin, end) of micro-batches: rows are repeatedly cut in two, where that saves the most padding."""
    saved = (tokens[0] - tokens) * np.cumsum(lines[::-1])[::-1]
    cut = int(saved.argmax())
    if saved[cut] <= overhead:
        return [(0, len(tokens))]
    later_spans = _spans_of_similar(tokens[cut:], lines[cut:], overhead)
    later_spans = [(cut + begin, cut + end) for begin, end in later_spans]
    return _spans_of_similar(tokens[:cut], lines[:cut], overhead) + later_spans


def _shared_work(rows: Tensor, tokens_B: Tensor, prompts: SharedPrompts, work: Callable[[int], float]) -> float:
    _, group_b = prompts.group_B[rows].unique(return_inverse=True)
    widths_G = torch.zeros(int(group_b.max()) + 1, dtype=torch.long)
    widths_G.scatter_reduce_(0, group_b, prompts.shared_B[rows], "amax")
    widths_G.index_add_(0, group_b, tokens_B[rows] - prompts.shared_B[rows])
    return len(widths_G) * work(int(widths_G.max()))


def _split_joined(rows: Tensor, tokens_B: Tensor, budget: int, prompts: SharedPrompts | None) -> list[Tensor]:
    """Micro-batches of rows end to end, longest first; with `prompts`, samples of a prompt are neighbours."""
    if prompts is None:
        prompts = SharedPrompts(torch.arange(len(tokens_B)), torch.zeros_like(tokens_B))
    else:
        rows = rows[prompts.group_B[rows].argsort(stable=True)]
    pieces: list[Tensor] = []
    start, size, last_group = 0, 0, None
    columns = (column[rows].tolist() for column in (tokens_B, *prompts))
    for end, (tokens, group, shared) in enumerate(zip(*columns, strict=True)):
        new_tokens = tokens - shared if group == last_group else tokens
        if end > start and size + new_tokens > budget:
            pieces.append(rows[start:end])
            start, size, new_tokens = end, 0, tokens
        size, last_group = size + new_tokens, group
    return [*pieces, rows[start:]] if len(rows) else []
