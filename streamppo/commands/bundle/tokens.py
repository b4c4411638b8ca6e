"""The numbers of every token of an update, as columns: from its log-probs to the rule that has left it out.

B trajectories, b rows of a pass, T completion tokens (padded).
"""

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
"""A column for each number, with an entry for each token of each pass of a row."""
EQUAL = "equal rewards"
"""The rule that leaves out the tokens of a group whose rewards teach nothing."""


class RowPass(NamedTuple):
    """A pass of the policy's loss over a row, the number `number` of this row; without `terms` it had none."""

    row: int
    number: int
    logprobs_T: Tensor | None = None
    terms: TokenTerms | None = None


def columns_of(config: Config, batch: Batch, updated: UpdateResult, rows: Sequence[int], model: str) -> Columns:
    """The columns of the tokens of `rows`; NaN where a number was not computed. `model` has the tokenizer."""
    spelled = _texts(batch, rows, model)
    found = [
        {
            "row": np.full(len(texts), one.row),
            "pass": np.full(len(texts), one.number),
            "position": np.arange(len(texts)),
            "token": ints(batch.trajectories[one.row].tokens),
            "text": np.array(texts, dtype=np.str_),
            "version": ints(batch.trajectories[one.row].versions),
            "lag": batch.version - ints(batch.trajectories[one.row].versions),
            **_numbers(config, updated, one, len(texts)),
            "dropped": np.array(_dropped(updated, one, len(texts)), dtype=np.str_),
        }
        for one in _passes(config, updated, rows)
        for texts in [spelled[one.row]]
    ]
    return {name: np.concatenate([columns[name] for columns in found]) for name in (found[0] if found else ())}


def _texts(batch: Batch, rows: Sequence[int], model: str) -> dict[int, list[str]]:
    """The text of every token; "" without a tokenizer."""
    tokens = {row: ints(batch.trajectories[row].tokens).tolist() for row in rows}
    with suppress(TaskError):
        tokenizer = Tokenizer(model)
        return {row: tokenizer.texts(found) for row, found in tokens.items()}
    return {row: [""] * len(found) for row, found in tokens.items()}


def _passes(config: Config, updated: UpdateResult, rows: Sequence[int]) -> Iterator[RowPass]:
    """Every pass over each of `rows`, by row."""
    loss = Loss(updated.objective, config.algorithm, updated.batch, updated.targets, 0.0)
    found: dict[int, list[RowPass]] = {row: [] for row in rows}
    for one in (one for minibatch in updated.minibatches for one in minibatch.passes):
        zeros = torch.zeros_like(one.logprobs_bT)
        with torch.no_grad():
            terms = loss.terms(one.rows, PolicyOutput(one.logprobs_bT, zeros, zeros, zeros[:, 0]))
        for at, row in enumerate(one.rows.tolist()):
            if row in found:
                found[row].append(RowPass(row, len(found[row]), one.logprobs_bT[at], _at(terms, at)))
    for row, passes in found.items():
        yield from passes or [RowPass(row, 0)]


def _at(terms: TokenTerms, at: int) -> TokenTerms:
    out = {name: dropped_bT[at] for name, dropped_bT in terms.out.items()}
    columns = {name: column_bT[at] for name, column_bT in terms._asdict().items() if name != "out"}
    return TokenTerms(**columns, out=out)


def _numbers(config: Config, updated: UpdateResult, one: RowPass, count: int) -> Columns:
    """The numbers of a row in a pass; those of the loss are NaN without one."""
    targets, batch, row, terms = updated.targets, updated.batch, one.row, one.terms
    nothing_T = torch.full((count,), torch.nan)
    scored_T = nothing_T
    if updated.objective.scores_policy and updated.chosen.scored_B[row]:
        scored_T = targets.scored.logprobs_BT[row]
    numbers = {
        "reward": batch.rewards_BT[row],
        "behavior": batch.behavior_logprobs_BT[row],
        "proximal": scored_T if terms is None else terms.proximal_bT,
        "logprob": nothing_T if one.logprobs_T is None else one.logprobs_T,
        "ratio": nothing_T if terms is None else terms.ratio_bT,
        "weight": nothing_T if terms is None else terms.weights_bT,
        "advantage": targets.estimate.advantages[row],
        "loss": nothing_T if terms is None else terms.loss_bT,
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


def _dropped(updated: UpdateResult, one: RowPass, count: int) -> list[str]:
    """The rules that have left each token out of the policy's loss; "" for one that is in it."""
    batch, row, terms = updated.batch, one.row, one.terms
    rules = {} if terms is None else {name: out_T[:count].tolist() for name, out_T in terms.out.items()}
    kept = None if terms is None else terms.kept_bT[:count].tolist()
    columns = (batch.mask_BT[row], batch.fresh_BT[row], updated.targets.trained_BT[row])
    told: list[str] = []
    for at, (sampled, fresh, trained) in enumerate(zip(*(column[:count].tolist() for column in columns), strict=True)):
        if not sampled:
            told.append("not sampled")
        elif not fresh:
            told.append("too old")
        elif named := [name for name, out in rules.items() if out[at]]:
            told.append(", ".join(named))
        elif not trained:
            is_filtered = TRUNCATED in updated.objective.rules and batch.truncated_B[row]
            told.append(TRUNCATED if is_filtered else EQUAL)
        elif kept is None:
            told.append(EQUAL if updated.chosen.idle_B[row] else "no pass")
        else:
            told.append("" if kept[at] else "weight 0")
    return told
