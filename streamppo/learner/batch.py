"""From a batch of trajectories to tensors, and from tensors to micro-batches. Pure: no Ray, no group.

B trajectories, L prompt + completion tokens (padded), T completion tokens (padded). Rows are padded on the right: with
causal attention no real token ever sees padding, so no attention mask is needed.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamppo.algorithms.candidates import Candidates
from streamppo.algorithms.masked import on_last_token
from streamppo.learner.device import to_device
from streamppo.process import phase
from streamppo.types import Batch, Trajectory, flags, floats, ints, routes

MUCH = 1 / 16
"""Padding of a micro-batch, as a share of its budget, from which on it has rows of similar lengths alone."""


@dataclass(frozen=True)
class Host:
    """The columns by which passes are laid out, in the host's memory: nothing there waits for a GPU.

    No tuple: FSDP moves the tensors that it finds in a pass's arguments.

    `expert` is the largest number of an expert in the routes of a whole batch, -1 without any. `widths` are the tokens
    of the longest completion of a selection, and of its longest row.
    """

    inputs_BL: Tensor
    start_B: Tensor
    length_B: Tensor
    expert: int = -1
    widths: tuple[int, int] = (0, 0)

    def select(self, rows: Tensor) -> "Host":
        """The trajectories at `rows`, cut to the longest of them."""
        start_B, length_B = self.start_B[rows], self.length_B[rows]
        widths = int(length_B.max()), int((start_B + length_B).max())
        return Host(self.inputs_BL[rows][:, : widths[1]], start_B, length_B, self.expert, widths)


class PaddedBatch(NamedTuple):
    """One batch as tensors, each row padded on the right to the longest.

    `mask_BT` are the tokens that the policy sampled, `fresh_BT` those of them that max_lag still allows to train.
    `lag_BT` is version - the token's version. `rewards_BT` sums to `reward_B`; `components_B` are its components by
    name, float64, NaN for a trajectory that lacks one. `start_B` is P, the length of the prompt; `length_B` is the
    completion's; `truncated_B` says that the completion was cut off. `cut_B` are segments that others follow, and
    `prefix_B` are the tokens of the segments before, which count as the prompt's. `candidates` [B, T] are there if some
    tokens were sampled with top-p or top-k. `teacher_logprobs_BT` are there if a teacher's server gave some, NaN for a
    trajectory that has none. `routes_BLE` are the experts that the engine chose for a token, layer by layer, -1 where
    it says none. `host` has the columns by which passes are laid out, of a batch on a GPU.
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
    routes_BLE: Tensor | None = None
    host: Host | None = None

    @property
    def on_host(self) -> Host:
        """The columns by which passes are laid out."""
        return self.host or Host(self.inputs_BL.cpu(), self.start_B.cpu(), self.length_B.cpu())

    @property
    def largest_expert(self) -> int:
        """At least the largest number of an expert in the routes; -1 without any."""
        if self.host is not None:
            return self.host.expert
        return -1 if self.routes_BLE is None else int(self.routes_BLE.max())

    def to(self, device: torch.device) -> "PaddedBatch":
        """The same batch on `device`."""
        candidates = None if self.candidates is None else self.candidates.to(device)
        components_B = {name: tensor.to(device) for name, tensor in self.components_B.items()}
        moved = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        host = None if device.type == "cpu" else replace(self.on_host, expert=self.largest_expert)
        return self._replace(**moved, components_B=components_B, candidates=candidates, host=host)

    def select(self, rows: Tensor) -> "PaddedBatch":
        """The trajectories at `rows`, which are the host's, cut to the longest of them."""
        host = self.on_host.select(rows)
        (width_T, width_L), here = host.widths, to_device(rows, self.start_B.device)
        picked = {name: tensor[here] for name, tensor in self._tensors().items()}
        for name, tensor in picked.items():
            if tensor.dim() > 1:
                picked[name] = tensor[:, : width_L if name.endswith(("L", "LE")) else width_T]
        candidates = None if self.candidates is None else self.candidates.at((here, slice(width_T)))
        return self._replace(**picked, candidates=candidates, host=self.host and host)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}


@phase("pack")
def pad(batch: Batch) -> PaddedBatch:
    """Right-padded CPU tensors of a whole batch."""
    trajectories = batch.trajectories
    start_B = torch.tensor([len(one.prompt_tokens) // 4 for one in trajectories])
    length_B = torch.tensor([one.num_tokens for one in trajectories])
    mask_BT = _padded(flags(b"".join(one.mask for one in trajectories)), length_B, 0)
    versions_BT = _padded(ints(b"".join(one.versions for one in trajectories)), length_B, batch.version).long()
    inputs = ints(b"".join(one.prompt_tokens + one.tokens for one in trajectories))
    reward_B = torch.tensor([one.reward for one in trajectories], dtype=torch.float32)
    return PaddedBatch(
        version=batch.version,
        inputs_BL=_padded(inputs, start_B + length_B, 0).long(),
        start_B=start_B,
        length_B=length_B,
        mask_BT=mask_BT,
        fresh_BT=mask_BT & (versions_BT >= batch.min_version),
        lag_BT=batch.version - versions_BT,
        behavior_logprobs_BT=_padded(floats(b"".join(one.logprobs for one in trajectories)), length_B, 0),
        reward_B=reward_B,
        rewards_BT=_rewards(trajectories, reward_B, mask_BT),
        truncated_B=torch.tensor([one.finish == "length" for one in trajectories]),
        cut_B=torch.tensor([one.finish == "cut" for one in trajectories]),
        prefix_B=torch.tensor([one.prefix for one in trajectories]),
        prompt_B=torch.tensor([one.identity.prompt for one in trajectories]),
        components_B=_components(trajectories),
        candidates=_candidates(trajectories, length_B),
        teacher_logprobs_BT=_teacher_logprobs(trajectories, length_B),
        routes_BLE=_routes(trajectories, start_B + length_B),
    )


def _routes(trajectories: Sequence[Trajectory], width_B: Tensor) -> Tensor | None:
    """The experts of every token of each row but the last, and -1 for those that the engine does not tell."""
    if not any(one.routes for one in trajectories):
        return None
    widths = width_B.tolist()
    given = [routes(one.routes).reshape(width - 1, -1) for one, width in zip(trajectories, widths, strict=True)]
    padded_BLE = np.full((len(given), int(width_B.max()), max(one.shape[1] for one in given)), -1, np.int16)
    for row, found in zip(padded_BLE, given, strict=True):
        row[: len(found), : found.shape[1]] = found
    return torch.from_numpy(padded_BLE)


def _teacher_logprobs(trajectories: Sequence[Trajectory], length_B: Tensor) -> Tensor | None:
    """The log-probs that a teacher's server gave; NaN for a trajectory that has none."""
    if not any(one.teacher_logprobs for one in trajectories):
        return None
    given = [one.teacher_logprobs or np.full(one.num_tokens, np.nan, "<f4").tobytes() for one in trajectories]
    return _padded(floats(b"".join(given)), length_B, 0)


def _candidates(trajectories: Sequence[Trajectory], length_B: Tensor) -> Candidates | None:
    """The candidates of all tokens; those of a trajectory without any are the whole vocabulary."""
    if not any(one.candidate_counts for one in trajectories):
        return None
    joined = b"".join(one.candidate_counts or bytes(4 * one.num_tokens) for one in trajectories)
    # Of a row that another rank reads, the counts alone are here.
    here = np.repeat([bool(one.candidates) for one in trajectories], length_B.numpy())
    counts = ints(joined).astype(np.int64)
    held = counts * here
    return Candidates(
        tokens_M=torch.from_numpy(np.concatenate([ints(one.candidates) for one in trajectories])),
        starts=_padded(np.cumsum(held) - held, length_B, 0),
        counts=_padded(counts, length_B, 0),
    )


def _rewards(trajectories: Sequence[Trajectory], reward_B: Tensor, mask_BT: Tensor) -> Tensor:
    """A trajectory's own token rewards, or its reward on the last token that the policy sampled."""
    rewards_BT = on_last_token(reward_B, mask_BT)
    for row, trajectory in enumerate(trajectories):
        if trajectory.token_rewards:
            rewards_BT[row, : trajectory.num_tokens] = torch.from_numpy(floats(trajectory.token_rewards).copy())
    return rewards_BT


def _components(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.components)
    rows = {name: [trajectory.components.get(name, math.nan) for trajectory in trajectories] for name in names}
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}


def _padded(joined: np.ndarray, length_B: Tensor, value: int) -> Tensor:
    """A flat column of all rows, one after another, as rows that are padded on the right with `value`."""
    lengths = length_B.numpy()
    padded = np.full((len(lengths), lengths.max()), value, dtype=joined.dtype)
    padded[np.arange(lengths.max()) < lengths[:, None]] = joined
    return torch.from_numpy(padded)


def unpadded(column_BT: Tensor, length_B: Tensor) -> bytes:
    """The float32 entries of all completions, one after another, as a bytes column."""
    valid_BT = torch.arange(column_BT.shape[1], device=column_BT.device) < length_B[:, None]
    return column_BT[valid_BT].cpu().numpy().astype("<f4").tobytes()


def row_order(num_rows: int, seed: int, version: int, epoch: int) -> Tensor:
    """The order in which an epoch goes over its rows: it depends on these numbers alone, in every Python and process.

    The generator's seed is the BLAKE2b hash of "seed version epoch", 8 bytes, big-endian.
    """
    digest = hashlib.blake2b(f"{seed} {version} {epoch}".encode(), digest_size=8).digest()
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))


def micro_batches(
    rows: Tensor,
    tokens_B: Tensor,
    budget: int,
    ranks: int,
    *,
    padded: bool = True,
    work: Callable[[int], float] = float,
) -> list[list[Tensor]]:
    """Split `rows` into micro-batches of at most `budget` tokens; entry r is for rank r.

    Each row counts as many tokens as the longest of its micro-batch if rows are `padded`. `work` is the cost of a row
    of so many tokens, by default their number.

    Every rank gets the same number of micro-batches, because each of them is a collective: where rows run out, a
    micro-batch is empty. Longest first, each row goes to the rank with the least work so far, so that padding is
    short and loads are equal to within one row. A row that is longer than the budget gets a micro-batch of its own.
    With a heavy tail of lengths padding would be most of the work: short rows have other micro-batches than long ones.
    """
    by_length = rows[torch.argsort(tokens_B[rows], descending=True, stable=True)]
    split = _split_padded if padded else _split_joined
    dealt = [by_length] if ranks == 1 else _dealt(by_length, tokens_B, ranks, work)
    shares = [split(mine, tokens_B[mine].tolist(), budget) for mine in dealt]
    most = max(map(len, shares))
    return [share + [by_length[:0]] * (most - len(share)) for share in shares]


def _dealt(by_length: Tensor, tokens_B: Tensor, ranks: int, work: Callable[[int], float]) -> list[Tensor]:
    """The rows of each rank: one after another goes to the one with the least work so far."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for row, tokens in zip(by_length.tolist(), tokens_B[by_length].tolist(), strict=True):
        lightest = loads.index(min(loads))
        dealt[lightest].append(row)
        loads[lightest] += work(tokens)
    return [torch.tensor(some, dtype=torch.long) for some in dealt]


def _split_padded(rows: Tensor, tokens: list[int], budget: int) -> list[Tensor]:
    """Longest first: the first row of a micro-batch is its width. Short rows begin another one where padding is much.

    Much is more than `MUCH` of the budget; a row is short if it is not above half of the width.
    """
    pieces: list[Tensor] = []
    start = 0
    while start < len(tokens):
        width, end, padding = tokens[start], start, 0
        for count in tokens[start : start + max(1, budget // width)]:
            padding += width - count
            if padding > MUCH * budget and 2 * count <= width:
                break
            end += 1
        pieces.append(rows[start:end])
        start = end
    return pieces


def _split_joined(rows: Tensor, tokens: list[int], budget: int) -> list[Tensor]:
    pieces: list[Tensor] = []
    start = 0
    while start < len(tokens):
        count = max(1, bisect_right(list(accumulate(tokens[start:])), budget))
        pieces.append(rows[start : start + count])
        start += count
    return pieces
