"""Columns with numbers of every token of an update. B trajectories, b rows of a pass, T completion tokens (padded)."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamppo.config.sections import Config
from streamppo.errors import TaskError
from streamppo.learner.model.policy import PolicyOutput
from streamppo.learner.objective.build_correction import TRUNCATED
from streamppo.learner.objective.loss import Loss, TokenTerms
from streamppo.learner.update import UpdateResult
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Batch, ints

Columns: TypeAlias = dict[str, NDArray[np.generic]]
"""Columns by name, with an entry for each token of each pass over a row."""
EQUAL = "equal rewards"
"""The entry in `dropped` of tokens whose group has equal rewards."""


class RowPass(NamedTuple):
    """Pass `number` of the policy's loss over a row. `terms` is None if no pass included the row."""

    row: int
    number: int
    logprobs_T: Tensor | None = None
    terms: TokenTerms | None = None


def columns_of(config: Config, batch: Batch, updated: UpdateResult, rows: Sequence[int], model: str) -> Columns:
    """Return the columns of the tokens of `rows`, with NaN for missing numbers. `model` is the tokenizer's folder."""
    texts_by_row = _texts(batch, rows, model)
    parts = [
        {
            "row": np.full(len(texts), row_pass.row),
            "pass": np.full(len(texts), row_pass.number),
            "position": np.arange(len(texts)),
            "token": ints(batch.trajectories[row_pass.row].tokens),
            "text": np.array(texts, dtype=np.str_),
            "version": ints(batch.trajectories[row_pass.row].versions),
            "lag": batch.version - ints(batch.trajectories[row_pass.row].versions),
            **_numbers(config, updated, row_pass, len(texts)),
            "dropped": np.array(_dropped(updated, row_pass, len(texts)), dtype=np.str_),
        }
        for row_pass in _passes(config, updated, rows)
        for texts in [texts_by_row[row_pass.row]]
    ]
    return {name: np.concatenate([columns[name] for columns in parts]) for name in (parts[0] if parts else ())}


def _texts(batch: Batch, rows: Sequence[int], model: str) -> dict[int, list[str]]:
    tokens = {row: ints(batch.trajectories[row].tokens).tolist() for row in rows}
    with suppress(TaskError):
        tokenizer = Tokenizer(model)
        return {row: tokenizer.texts(ids) for row, ids in tokens.items()}
    return {row: [""] * len(ids) for row, ids in tokens.items()}


def _passes(config: Config, updated: UpdateResult, rows: Sequence[int]) -> Iterator[RowPass]:
    loss = Loss(updated.objective, config.algorithm, updated.batch, updated.targets, 0.0)
    by_row: dict[int, list[RowPass]] = {row: [] for row in rows}
    for forward in (forward for minibatch in updated.minibatches for forward in minibatch.passes):
        zeros = torch.zeros_like(forward.logprobs_bT)
        with torch.no_grad():
            terms = loss.terms(forward.rows, PolicyOutput(forward.logprobs_bT, zeros, zeros, zeros[:, 0]))
        for at, row in enumerate(forward.rows.tolist()):
            if row in by_row:
                by_row[row].append(RowPass(row, len(by_row[row]), forward.logprobs_bT[at], _at(terms, at)))
    for row, passes in by_row.items():
        yield from passes or [RowPass(row, 0)]


def _at(terms: TokenTerms, at: int) -> TokenTerms:
    left_out = {name: dropped_bT[at] for name, dropped_bT in terms.left_out.items()}
    columns = {name: column_bT[at] for name, column_bT in terms._asdict().items() if name != "left_out"}
    return TokenTerms(**columns, left_out=left_out)


def _numbers(config: Config, updated: UpdateResult, row_pass: RowPass, count: int) -> Columns:
    targets, batch, row, terms = updated.targets, updated.batch, row_pass.row, row_pass.terms
    nan_T = torch.full((count,), torch.nan)
    scored_T = nan_T
    if updated.objective.scores_policy and updated.active.scored_B[row]:
        scored_T = targets.scored.logprobs_BT[row]
    numbers = {
        "reward": batch.rewards_BT[row],
        "behavior": batch.behavior_logprobs_BT[row],
        "proximal": scored_T if terms is None else terms.proximal_bT,
        "logprob": nan_T if row_pass.logprobs_T is None else row_pass.logprobs_T,
        "ratio": nan_T if terms is None else terms.ratio_bT,
        "weight": nan_T if terms is None else terms.weights_bT,
        "advantage": targets.estimate.advantages[row],
        "loss": nan_T if terms is None else terms.loss_bT,
    }
    if config.algorithm.has_critic:
        numbers |= {"value": targets.scored.values_BT[row], "return": targets.estimate.returns[row]}
    if targets.reference_BT is not None:
        numbers["reference"] = targets.reference_BT[row]
    if targets.teacher_BT is not None:
        numbers["teacher"] = targets.teacher_BT[row]
    columns: Columns = {name: column_T[:count].float().cpu().numpy() for name, column_T in numbers.items()}
    clipped_T = torch.zeros(count, dtype=torch.bool) if terms is None else terms.clipped_bT[:count]
    return {**columns, "clipped": clipped_T.cpu().numpy()}


def _dropped(updated: UpdateResult, row_pass: RowPass, count: int) -> list[str]:
    """Return the rules that excluded each token from the policy's loss; "" for a token in the loss."""
    batch, row, terms = updated.batch, row_pass.row, row_pass.terms
    rules = {} if terms is None else {name: out_T[:count].tolist() for name, out_T in terms.left_out.items()}
    in_loss = None if terms is None else terms.kept_bT[:count].tolist()
    columns = (batch.mask_BT[row], batch.fresh_BT[row], updated.targets.trained_BT[row])
    reasons: list[str] = []
    for at, (sampled, fresh, trained) in enumerate(zip(*(column[:count].tolist() for column in columns), strict=True)):
        if not sampled:
            reasons.append("not sampled")
        elif not fresh:
            reasons.append("too old")
        elif excluding := [name for name, out in rules.items() if out[at]]:
            reasons.append(", ".join(excluding))
        elif not trained:
            is_filtered = TRUNCATED in updated.objective.rules and batch.truncated_B[row]
            reasons.append(TRUNCATED if is_filtered else EQUAL)
        elif in_loss is None:
            reasons.append(EQUAL if updated.active.idle_B[row] else "no pass")
        else:
            reasons.append("" if in_loss[at] else "weight 0")
    return reasons
