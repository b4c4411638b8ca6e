"""Batches of rows with random branches, and a policy that scores each path of a row separately."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import learner_case as case
import numpy as np
import torch
from msgspec.structs import replace

from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model.policy import Part, Policy, PolicyOutput, empty_output
from streamppo.types import Batch, Trajectory, branches


def batch(rows: int = case.BATCH, seed: int = 0, *, version: int = 3, longest: int = 14, linear: int = 2) -> Batch:
    """Trajectories with up to four branches; every `linear`-th trajectory has none."""
    generator = np.random.default_rng(seed)
    made = (_trajectory(generator, number, version, longest, branched=bool(number % linear)) for number in range(rows))
    return Batch(version=version, min_version=1, trajectories=tuple(made))


def _trajectory(
    generator: np.random.Generator, number: int, version: int, longest: int, *, branched: bool
) -> Trajectory:
    count, prompt = int(generator.integers(6, longest + 1)), int(generator.integers(1, 6))
    mask = generator.random(count) < 0.7
    mask[-1] = True
    pairs: list[tuple[int, int]] = []
    if branched:
        starts = generator.choice(count - 1, int(generator.integers(1, 5)), replace=False)
        pairs = [(int(at) + prompt, int(generator.integers(-1, at + prompt - 1))) for at in sorted(starts)]
        mask[starts] = False
    return replace(case.drawn_row(generator, number, version, prompt, mask), branches=branches.column(pairs))


class Leaf(NamedTuple):
    """A path of row `row`: the places of its tokens, and (`own`) those on no earlier path."""

    row: int
    path: list[int]
    own: set[int]


def leaves_of(columns: Sequence[bytes], widths: Sequence[int]) -> list[Leaf]:
    """The paths of all rows, found by following the parents of each leaf."""
    made: list[Leaf] = []
    for row, (column, width) in enumerate(zip(columns, widths, strict=True)):
        other = {int(start): int(parent) for start, parent in branches.pairs(column)}
        follows = [other.get(token, token - 1) for token in range(width)]
        known: set[int] = set()
        for leaf in sorted(set(range(width)) - set(follows)):
            path = [leaf]
            while follows[path[0]] >= 0:
                path.insert(0, follows[path[0]])
            assert all(before < after for before, after in pairwise(path))
            made.append(Leaf(row, path, set(path) - known))
            known |= set(path)
    return made


def unrolled(plain: Callable[[PaddedBatch, Part], PolicyOutput], rows: PaddedBatch, part: Part) -> PolicyOutput:
    """Score rows with `plain`, a forward pass for linear rows: each path is a row, and scores are of the first path."""
    start_B, mask_BT = rows.start_B.tolist(), rows.mask_BT.tolist()
    leaves = leaves_of(rows.branches or (b"",) * len(start_B), (rows.start_B + rows.length_B).tolist())
    like = case.batch().trajectories[0]
    lines = [rows.inputs_BL[leaf.row, leaf.path].numpy().astype(np.int32) for leaf in leaves]
    made = [_line(like, line) for line in lines]
    scored, whole = plain(pad(Batch(version=3, min_version=0, trajectories=tuple(made))), part), empty_output(rows)
    entries = [
        (leaf.row, token - start_B[leaf.row], number, leaf.path.index(token) - 1)
        for number, leaf in enumerate(leaves)
        for token in sorted(leaf.own)
        if token >= start_B[leaf.row] and mask_BT[leaf.row][token - start_B[leaf.row]]
    ]
    row, column, line, place = (torch.tensor(one) for one in zip(*entries, strict=True))
    spread = [
        into.index_put((row, column), found[line, place]) for into, found in zip(whole[:3], scored[:3], strict=True)
    ]
    # The value before a completion is needed even if its first token was not sampled.
    states = torch.cat([scored.values_BT, scored.values_BT.new_zeros(len(leaves), 1)], 1)
    states[torch.arange(len(leaves)), [max(1, len(leaf.path) - 1) for leaf in leaves]] = scored.bootstrap_B
    for number, leaf in reversed(list(enumerate(leaves))):
        if (before := start_B[leaf.row] - 1) in leaf.own:
            spread[2] = spread[2].index_put(
                (torch.tensor(leaf.row), torch.tensor(0)), states[number, leaf.path.index(before)]
            )
    last = [max(number for number, leaf in enumerate(leaves) if leaf.row == one) for one in range(len(start_B))]
    logprobs_BT, entropy_BT, values_BT = spread
    return PolicyOutput(logprobs_BT, entropy_BT, values_BT, scored.bootstrap_B[torch.tensor(last)])


def _line(like: Trajectory, line: np.ndarray) -> Trajectory:
    """A linear trajectory of these tokens; all but the first are its completion. A single token is doubled."""
    tokens = line if len(line) > 1 else np.append(line, line)
    count = len(tokens) - 1
    return replace(
        like,
        prompt_tokens=tokens[:1].tobytes(),
        tokens=tokens[1:].tobytes(),
        logprobs=np.zeros(count, np.float32).tobytes(),
        versions=np.zeros(count, np.int32).tobytes(),
        mask=np.ones(count, np.bool_).tobytes(),
    )


def unroll(policy: Policy) -> Policy:
    """Make `policy` score each path of a row separately."""
    plain = policy.forward
    policy.forward = lambda rows, part: unrolled(plain, rows, part)
    return policy
