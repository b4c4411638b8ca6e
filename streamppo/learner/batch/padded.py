"""A batch of trajectories as padded tensors. Pure: no Ray, no process group.

B trajectories, L prompt + completion tokens (padded), T completion tokens (padded). Rows are padded on the right, so
under causal attention no real token sees padding, and no attention mask is needed.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamppo.algorithms.candidates import Candidates
from streamppo.algorithms.masked import on_last_token
from streamppo.learner.batch.routes import RowRoutes, routes_of_rows
from streamppo.learner.device import to_device
from streamppo.process import phase
from streamppo.types import Batch, Trajectory, flags, floats, ints


@dataclass(frozen=True)
class Host:
    """The columns that determine the layout of passes, in host memory: the host reads them without waiting for a GPU.

    FSDP would move a tuple's tensors to the GPU with a pass's other arguments, so this class is not a tuple. `widths`
    are the numbers of tokens of a selection's longest completion and of its longest row. `branches` has an entry for
    each row, or is None if no row has branches.
    """

    inputs_BL: Tensor
    start_B: Tensor
    length_B: Tensor
    prompt_B: Tensor
    prefix_B: Tensor
    widths: tuple[int, int] = (0, 0)
    branches: tuple[bytes, ...] | None = None

    def select(self, rows: Tensor) -> "Host":
        """Select the trajectories at `rows`, cut to the longest of them."""
        start_B, length_B = self.start_B[rows], self.length_B[rows]
        widths = int(length_B.max()), int((start_B + length_B).max())
        branches = None if self.branches is None else _none_if_empty([self.branches[row] for row in rows.tolist()])
        columns = start_B, length_B, self.prompt_B[rows], self.prefix_B[rows]
        # Pinning keeps strides, and only contiguous memory is copied to a GPU without waiting.
        return Host(self.inputs_BL[rows, : widths[1]].contiguous(), *columns, widths, branches)

    def shared_prompts(self) -> "SharedPrompts":
        """Group the rows that have equal tokens before their completions."""
        group_B = self.prompt_B * (1 + self.start_B.max()) + self.start_B
        # A row that continues an earlier segment shares its prefix with no other row.
        group_B = torch.where(self.prefix_B > 0, -1 - torch.arange(len(self.prefix_B)), group_B)
        return SharedPrompts(group_B, self.start_B)


class PaddedBatch(NamedTuple):
    """One batch as tensors; rows are padded on the right to the longest.

    `mask_BT` is True for tokens that the policy sampled, `fresh_BT` for sampled tokens within max_lag. `lag_BT` is the
    batch's version minus the token's version. `rewards_BT` sums to `reward_B` over a row. `components_B` are the
    reward's components by name, float64; NaN for a trajectory without the component. `start_B` and `length_B` are the
    lengths of prompt and completion in tokens. `cut_B` is True for segments after which another segment follows.
    `prefix_B` is the number of tokens in earlier segments, which count as part of the prompt. `candidates` [B, T] is
    None unless tokens were sampled with top-p or top-k. `teacher_logprobs_BT` is None without a teacher's server, and
    NaN for a trajectory without them. `routes` are the engine's experts for the tokens of this rank's rows. `branches`
    describe each row's tokens as a tree. For a batch on a GPU, `host` has the columns for the layout of passes.
    """

    version: int
    inputs_BL: Tensor
    start_B: Tensor
    length_B: Tensor
    mask_BT: Tensor
    fresh_BT: Tensor
    lag_BT: Tensor
    behavior_logprobs_BT: Tensor
    reward_B: Tensor
    rewards_BT: Tensor
    truncated_B: Tensor
    cut_B: Tensor
    prefix_B: Tensor
    prompt_B: Tensor
    components_B: Mapping[str, Tensor]
    candidates: Candidates | None = None
    teacher_logprobs_BT: Tensor | None = None
    routes: RowRoutes | None = None
    branches: tuple[bytes, ...] | None = None
    host: Host | None = None

    @property
    def on_host(self) -> Host:
        if self.host is not None:
            return self.host
        inputs_BL, start_B, length_B = self.inputs_BL.cpu(), self.start_B.cpu(), self.length_B.cpu()
        return Host(inputs_BL, start_B, length_B, self.prompt_B.cpu(), self.prefix_B.cpu(), branches=self.branches)

    def to(self, device: torch.device) -> "PaddedBatch":
        """Copy the batch to `device`; its routes stay in host memory."""
        candidates = None if self.candidates is None else self.candidates.to(device)
        components_B = {name: tensor.to(device) for name, tensor in self.components_B.items()}
        moved = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        host = None if device.type == "cpu" else self.on_host
        return self._replace(**moved, components_B=components_B, candidates=candidates, host=host)

    def select(self, rows: Tensor) -> "PaddedBatch":
        """Select the trajectories at `rows` (a CPU tensor), cut to the longest of them."""
        host = self.on_host.select(rows)
        (width_T, width_L), device_rows = host.widths, to_device(rows, self.start_B.device)
        picked = {name: tensor[device_rows] for name, tensor in self._tensors().items()}
        for name, tensor in picked.items():
            if tensor.dim() > 1:
                picked[name] = tensor[:, : width_L if name.endswith("L") else width_T]
        candidates = None if self.candidates is None else self.candidates.at((device_rows, slice(width_T)))
        routes = None if self.routes is None else self.routes.select(rows)
        chosen = {"candidates": candidates, "routes": routes, "branches": host.branches, "host": self.host and host}
        return self._replace(**picked, **chosen)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


@phase("pack")
def pad(batch: Batch) -> PaddedBatch:
    """Convert a batch to right-padded CPU tensors."""
    trajectories = batch.trajectories
    start_B = torch.tensor([len(trajectory.prompt_tokens) // 4 for trajectory in trajectories])
    length_B = torch.tensor([trajectory.num_tokens for trajectory in trajectories])
    mask_BT = _pad_column(flags(b"".join(trajectory.mask for trajectory in trajectories)), length_B, 0)
    versions = ints(b"".join(trajectory.versions for trajectory in trajectories))
    versions_BT = _pad_column(versions, length_B, batch.version).long()
    inputs = ints(b"".join(trajectory.prompt_tokens + trajectory.tokens for trajectory in trajectories))
    logprobs = floats(b"".join(trajectory.logprobs for trajectory in trajectories))
    reward_B = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32)
    rewards_BT = on_last_token(reward_B, mask_BT)
    for row, trajectory in enumerate(trajectories):
        if trajectory.token_rewards:
            rewards_BT[row, : trajectory.num_tokens] = torch.from_numpy(floats(trajectory.token_rewards).copy())
    return PaddedBatch(
        version=batch.version,
        inputs_BL=_pad_column(inputs, start_B + length_B, 0).long(),
        start_B=start_B,
        length_B=length_B,
        mask_BT=mask_BT,
        fresh_BT=mask_BT & (versions_BT >= batch.min_version),
        lag_BT=batch.version - versions_BT,
        behavior_logprobs_BT=_pad_column(logprobs, length_B, 0),
        reward_B=reward_B,
        rewards_BT=rewards_BT,
        truncated_B=torch.tensor([trajectory.finish == "length" for trajectory in trajectories]),
        cut_B=torch.tensor([trajectory.finish == "cut" for trajectory in trajectories]),
        prefix_B=torch.tensor([trajectory.prefix for trajectory in trajectories]),
        prompt_B=torch.tensor([trajectory.identity.prompt for trajectory in trajectories]),
        components_B=_components(trajectories),
        candidates=_candidates(trajectories, length_B),
        teacher_logprobs_BT=_teacher_logprobs(trajectories, length_B),
        routes=routes_of_rows(trajectories),
        branches=_none_if_empty([trajectory.branches for trajectory in trajectories]),
    )


def _none_if_empty(columns: Sequence[bytes]) -> tuple[bytes, ...] | None:
    return tuple(columns) if any(columns) else None


def _teacher_logprobs(trajectories: Sequence[Trajectory], length_B: Tensor) -> Tensor | None:
    """[B, T], log-probs from a teacher's server; NaN for a trajectory without them; None if all lack them."""
    if not any(trajectory.teacher_logprobs for trajectory in trajectories):
        return None
    logprobs = [
        trajectory.teacher_logprobs or np.full(trajectory.num_tokens, np.nan, "<f4").tobytes()
        for trajectory in trajectories
    ]
    return _pad_column(floats(b"".join(logprobs)), length_B, 0)


def _candidates(trajectories: Sequence[Trajectory], length_B: Tensor) -> Candidates | None:
    if not any(trajectory.candidate_counts for trajectory in trajectories):
        return None
    joined = b"".join(trajectory.candidate_counts or bytes(4 * trajectory.num_tokens) for trajectory in trajectories)
    # Rows of other ranks have candidate counts but no candidate ids.
    has_ids = np.repeat([bool(trajectory.candidates) for trajectory in trajectories], length_B.numpy())
    counts = ints(joined).astype(np.int64)
    num_ids = counts * has_ids
    return Candidates(
        tokens_M=torch.from_numpy(np.concatenate([ints(trajectory.candidates) for trajectory in trajectories])),
        starts=_pad_column(np.cumsum(num_ids) - num_ids, length_B, 0),
        counts=_pad_column(counts, length_B, 0),
    )


def _components(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.components)
    rows = {name: [trajectory.components.get(name, math.nan) for trajectory in trajectories] for name in names}
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}


def _pad_column(joined: np.ndarray, length_B: Tensor, value: int) -> Tensor:
    """Split `joined`, the entries of all rows end to end, into rows, and pad them on the right with `value`."""
    lengths = length_B.numpy()
    padded = np.full((len(lengths), lengths.max()), value, dtype=joined.dtype)
    padded[np.arange(lengths.max()) < lengths[:, None]] = joined
    return torch.from_numpy(padded)


def flatten_column(column_BT: Tensor, length_B: Tensor) -> bytes:
    """Join the entries of all completions end to end, as float32 bytes without padding."""
    valid_BT = torch.arange(column_BT.shape[1], device=column_BT.device) < length_B[:, None]
    return column_BT[valid_BT].cpu().numpy().astype("<f4").tobytes()


def row_order(num_rows: int, seed: int, version: int, epoch: int) -> Tensor:
    """The order of rows in an epoch. The seed is the BLAKE2b hash of "seed version epoch", 8 bytes, big-endian."""
    digest = hashlib.blake2b(f"{seed} {version} {epoch}".encode(), digest_size=8).digest()
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))


class SharedPrompts(NamedTuple):
    """The group of each row, and the number of tokens that a micro-batch computes once for all rows of a group."""

    group_B: Tensor
    shared_B: Tensor
