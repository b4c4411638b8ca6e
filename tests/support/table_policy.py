"""A policy from tables: one distribution for all tokens, and a value for each token; results are computable by hand."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from streamppo.config.sections import Config
from streamppo.learner.attention import attention, tree
from streamppo.learner.batch.padded import Host, PaddedBatch
from streamppo.learner.model.policy import Part, PolicyOutput
from streamppo.learner.objective import objective
from streamppo.learner.parallel.routing import Routers
from streamppo.learner.update import Updater


class Tables(nn.Module):
    """The policy's weights: the log-prob of each token."""

    def __init__(self, probabilities_V: list[float]) -> None:
        super().__init__()
        self.config = PretrainedConfig(hidden_size=1)
        self.logits_V = nn.Parameter(torch.tensor(probabilities_V, dtype=torch.float64).log().float())


class TablePolicy(nn.Module):
    """Replaces `Policy`: `values_V` is the critic's value before each token; `last` is its value after the last one."""

    layout = staticmethod(attention.padded)

    def __init__(self, probabilities_V: list[float], values_V: list[float], last: float = 0.0) -> None:
        super().__init__()
        self.lm = Tables(probabilities_V)
        self.values_V = nn.Parameter(torch.tensor(values_V))
        self.last = last
        self.routers = Routers(None)
        self.passes: list[Part] = []

    def reshard(self) -> None:
        """Do nothing: no weights are gathered."""

    def sizes(self, host: Host) -> tree.RowSizes:
        """As `Policy.sizes`, for rows without branches."""
        return tree.sizes(host, attention.padded, None)

    def _get_fsdp_state(self) -> SimpleNamespace:
        return SimpleNamespace(_comm_ctx=SimpleNamespace(post_forward_order=[]))

    def forward(self, rows: PaddedBatch, part: Part) -> PolicyOutput:
        """Score completions of rows with prompts of one token."""
        self.passes.append(part)
        tokens_BT = rows.inputs_BL[:, 1:]
        logp_V = self.lm.logits_V.log_softmax(-1)
        valid_BT = torch.arange(tokens_BT.shape[1]) < rows.length_B[:, None]
        entropy_BT = -(logp_V.exp() * logp_V).sum().expand(tokens_BT.shape)
        return PolicyOutput(
            logp_V[tokens_BT].masked_fill(~valid_BT, 0.0),
            entropy_BT.masked_fill(~valid_BT, 0.0),
            self.values_V[tokens_BT].masked_fill(~valid_BT, 0.0),
            torch.full(rows.start_B.shape, self.last) + 0 * self.values_V.sum(),
        )


class Scripted(torch.optim.SGD):
    """Ignores gradients: each step replaces the tables by the next ones of a script."""

    def __init__(self, policy: TablePolicy, script: list[tuple[list[float], list[float]]]) -> None:
        super().__init__(policy.parameters(), lr=0.25)
        self.policy, self.script = policy, list(script)

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy the next tables, if there are any."""
        if not self.script:
            return
        probabilities_V, values_V = self.script.pop(0)
        with torch.no_grad():
            self.policy.lm.logits_V.copy_(torch.tensor(probabilities_V).log())
            self.policy.values_V.copy_(torch.tensor(values_V))


def updater(
    config: Config, policy: TablePolicy, reference: TablePolicy | None, optimizer: torch.optim.Optimizer
) -> Updater:
    """The learner's updater on tables."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = Updater(
        policy,  # pyright: ignore[reportArgumentType]
        optimizer,
        objective.build(config),
        config,
        group=mesh.get_group(),
    )
    made.reference = reference  # pyright: ignore[reportAttributeAccessIssue]
    return made
