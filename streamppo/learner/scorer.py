"""The passes over a batch before its first step: by the policy, its critic, the reference and a teacher.

B trajectories of the batch, T completion tokens (padded).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.config.sections import Config
from streamppo.errors import UpdateError
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.batching import STAND_IN
from streamppo.learner.device import add_up, to_device
from streamppo.learner.model.frozen import NoReferenceWeights
from streamppo.learner.model.policy import Part, Policy, PolicyOutput, empty_output, release
from streamppo.learner.objective.objective import Objective
from streamppo.learner.objective.targets import Frozen, Targets, compute_targets, teacher_logprobs_from_batch
from streamppo.process import phase


class Scorer(NamedTuple):
    """Scores this rank's micro-batches `pieces` of the rows `scored_B`, and gathers the scores of all ranks of `group`.

    `keeps_graphs`: the steps pass over the same micro-batches, whose graphs fit into memory together. Calls are
    collectives.
    """

    policy: Policy
    reference: Policy | NoReferenceWeights | None
    teacher: Policy | None
    config: Config
    group: dist.ProcessGroup
    pieces: list[Tensor]
    scored_B: Tensor
    keeps_graphs: bool

    def prepare(self, objective: Objective, batch: PaddedBatch, *, beta: float) -> tuple[Targets, list[PolicyOutput]]:
        """The targets of `batch`, and the passes with their graphs if the step can reuse them, else an empty list.

        `beta` is the weight of the KL in the reward. Raises `UpdateError` for data that must not be trained on.
        """
        scored, graphs = self._score_batch(objective, batch)
        try:
            frozen = Frozen(self._frozen(self.reference, batch), self._taught(batch))
            with phase("targets"):
                return compute_targets(objective, self.config, batch, scored, frozen, self.scored_B, beta=beta), graphs
        except ValueError as error:
            raise UpdateError(f"batch {batch.version} cannot be trained on: {error}") from error

    def _score_batch(self, objective: Objective, batch: PaddedBatch) -> tuple[PolicyOutput, list[PolicyOutput]]:
        """The scores of the whole batch; and the passes with their graphs, if they are those of the only step."""
        part = objective.scored
        if part is None:
            return empty_output(batch), []
        is_only_pass = self.keeps_graphs and part != "critic" and objective.one_step
        with torch.set_grad_enabled(is_only_pass):
            scores = [score(self.policy, batch, rows, part) for rows in self.pieces]
        return self._gather(batch, scores), scores if is_only_pass else []

    def _frozen(self, model: Policy | NoReferenceWeights | None, batch: PaddedBatch) -> Tensor | None:
        """[B, T] log-probs of `model`, the reference or the teacher, by its own routes; None without a model."""
        if model is None:
            return None
        with torch.no_grad():
            scores = [score(model, batch._replace(routes=None), rows, "policy") for rows in self.pieces]
        if isinstance(model, Policy):
            release(model)
        return self._gather(batch, scores).logprobs_BT

    def _taught(self, batch: PaddedBatch) -> Tensor | None:
        """[B, T] log-probs of the teacher, from a pass here or from its server; None without a teacher."""
        is_server = bool(self.config.algorithm.teacher.url)
        return teacher_logprobs_from_batch(batch) if is_server else self._frozen(self.teacher, batch)

    def _gather(self, batch: PaddedBatch, scores: list[PolicyOutput]) -> PolicyOutput:
        """The scores of every rank's rows, whole and detached, on every rank."""
        whole = empty_output(batch)
        for rows, scored in zip(self.pieces, scores, strict=True):
            device_rows = to_device(rows, batch.mask_BT.device)
            for into, part in zip(whole, scored, strict=True):
                where = (device_rows, slice(part.shape[1])) if part.dim() == 2 else (device_rows,)
                into[where] = part[: len(rows)].detach().to(into.dtype)
        for column in whole:
            add_up(column, self.group)
        return whole


@phase("forward")
def score(policy: Policy | NoReferenceWeights, batch: PaddedBatch, rows: Tensor, part: Part) -> PolicyOutput:
    """The scores of `rows` by `policy`. An empty micro-batch passes one row: the pass is a collective."""
    if isinstance(policy, Policy):
        policy.routers.counts = len(rows) > 0
    return policy(batch.select(rows if len(rows) else STAND_IN), part)
