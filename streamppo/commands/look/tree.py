"""Builds the tree of a multi-turn trajectory: its prompt, turns and messages are nodes, oldest first.

    row      prompt 0-8   turn 1 9-10   message 11-13   turn 2 14-15   message 16-20 after 8   turn 3 21-22

    tokens 0 to 8        prompt      '[user]12+34=[assistant]'
    tokens 9 to 10       turn 1      '=': reward 0, versions 2 x 4
    tokens 11 to 13      message     '46='
    tokens 14 to 15      turn 2      '46': reward 1, versions 2 x 5; 11 of the 14 tokens before it were reused
      tokens 16 to 20    branch      after token 8: '[user]and 1+1?[assistant]'
      tokens 21 to 22    turn 3      '2': not received; versions 2 x 5

A node whose parent is not the preceding token begins a branch, and is indented below its parent's node. The
trajectory's column `turns` has the turns, with reused and received tokens. Without it, turns follow from the mask.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from streamppo.rollout.endpoint import reply
from streamppo.terminal import counted
from streamppo.types import Batch, Floats, Ints, Trajectory, branches, flags, floats, ints, turns
from streamppo.types.turns import TurnPlace

Kind: TypeAlias = Literal["prompt", "turn", "message", "again"]
Spell: TypeAlias = Callable[[Ints], str]
NO_BRANCH = -2
UNKNOWN = -1
"""The number of reused tokens if the column `turns` is missing."""


class TreeNode(NamedTuple):
    """A node: tokens `start` to `end` - 1 of a row. `context` is the number of tokens on the path before the node.

    If the node does not follow the previous token of the row, `parent` is the token that it follows (-1: none). A node
    of kind "again" repeats the last token of a context, which then gets another answer. A turn has a `number`, and
    `versions` with a pair (length, version) for each stretch of tokens that one version sampled. `too_old` is the
    number of its tokens beyond max_lag.
    """

    kind: Kind
    start: int
    end: int
    level: int
    text: str
    parent: int = NO_BRANCH
    number: int = 0
    context: int = 0
    versions: tuple[tuple[int, int], ...] = ()
    reward: float = 0.0
    reused: int = UNKNOWN
    delivered: bool = True
    too_old: int = 0
    calls: tuple[str, ...] = ()

    @property
    def is_branch(self) -> bool:
        return self.parent != NO_BRANCH

    @property
    def behind(self) -> str:
        """In words, the token that a branch follows; "" for other nodes."""
        if not self.is_branch:
            return ""
        return "after nothing" if self.parent < 0 else f"after token {self.parent}"

    @property
    def name(self) -> str:
        if self.kind == "turn":
            return f"turn {self.number}"
        return "branch" if self.is_branch and self.kind == "message" else self.kind

    def notes(self) -> Iterator[str]:
        if self.calls:
            yield f"calls {', '.join(self.calls)}"
        if self.kind != "turn":
            return
        yield f"reward {self.reward:g}" if self.delivered else "not received, and not trained on"
        yield f"versions {', '.join(f'{count} x {version}' for count, version in self.versions)}"
        if self.too_old:
            yield f"{self.too_old} tokens are too old"
        if self.reused != UNKNOWN:
            yield f"{self.reused} of the {self.context} tokens before it were reused"


def has_tree(trajectory: Trajectory) -> bool:
    """True if a trajectory has more than a prompt and one turn."""
    return bool(trajectory.branches or trajectory.turns or not flags(trajectory.mask).all())


def nodes(batch: Batch, trajectory: Trajectory, spell: Spell) -> list[TreeNode]:
    """Return the nodes of a trajectory of `batch`, in the order of tokens."""
    prompt, row = len(trajectory.prompt_tokens) // 4, ints(trajectory.prompt_tokens + trajectory.tokens)
    turn_places, depth = _turns(trajectory, prompt), branches.depths(trajectory.branches, len(row))
    numbers = {place.start: number for number, place in enumerate(turn_places, 1)}
    rewards, versions = _rewards(trajectory), ints(trajectory.versions)
    tree_nodes, starts = list[TreeNode](), list[int]()
    for piece in branches.pieces(trajectory.branches, len(row)):
        for begin, end in _cuts(piece.start, piece.end, prompt, turn_places):
            parent = piece.parent if begin == piece.start and begin else NO_BRANCH
            level = tree_nodes[-1].level if tree_nodes else 0
            if parent != NO_BRANCH:
                level = tree_nodes[bisect_right(starts, parent) - 1].level + 1 if parent >= 0 else 0
            node = TreeNode("message", begin, end, level, spell(row[begin:end]), parent)
            if begin in numbers:
                turn, sampled = turn_places[numbers[begin] - 1], slice(begin - prompt, end - prompt)
                node = node._replace(
                    kind="turn",
                    number=numbers[begin],
                    context=int(depth[begin]),
                    versions=count_versions(versions[sampled]),
                    reward=float(rewards[sampled].sum()),
                    reused=turn.reused,
                    delivered=bool(turn.delivered),
                    too_old=int((versions[sampled] < batch.min_version).sum()) if turn.delivered else 0,
                    calls=tuple(f"{call.name}({call.arguments})" for call in reply.read(node.text).calls),
                )
            elif begin < prompt:
                node = node._replace(kind="prompt")
            elif parent >= 0 and end == begin + 1 and row[begin] == row[parent + 1]:
                node = node._replace(kind="again")
            tree_nodes.append(node)
            starts.append(begin)
    return tree_nodes


def totals(tree_nodes: list[TreeNode]) -> str:
    """Return the numbers of turns, branches and undelivered tokens of a tree, in words."""
    split = sum(node.is_branch for node in tree_nodes)
    lost = sum(node.end - node.start for node in tree_nodes if not node.delivered)
    words = f"{counted(sum(node.kind == 'turn' for node in tree_nodes), 'turn')}, {split} branch{'es' * (split != 1)}"
    return f"{words}, {lost} tokens not received" if lost else words


def outline(tree_nodes: list[TreeNode], quote: Callable[[str], str]) -> Iterator[str]:
    """Yield a line for each node of a tree. `quote` escapes and shortens a text."""
    places = [f"{'  ' * node.level}tokens {node.start} to {node.end - 1}" for node in tree_nodes]
    width = max(map(len, places), default=0)
    for node, place in zip(tree_nodes, places, strict=True):
        behind = f"{node.behind}: " if node.behind else ""
        notes = "; ".join(node.notes())
        yield f"{place:<{width}}  {node.name:<8}  {behind}{quote(node.text)}{': ' if notes else ''}{notes}"


def _turns(trajectory: Trajectory, prompt: int) -> list[TurnPlace]:
    """Return the turns in the column `turns`. Without the column, consecutive sampled tokens of a branch are a turn."""
    if trajectory.turns:
        return turns.read(trajectory.turns)
    places, at = list[TurnPlace](), 0
    begins = {int(start) for start, _ in branches.pairs(trajectory.branches)}
    for is_sampled, run in groupby(flags(trajectory.mask).tolist()):
        end = at + len(list(run))
        cuts = sorted(start - prompt for start in begins if at < start - prompt < end)
        if is_sampled:
            ends = [*cuts, end]
            places += [TurnPlace(prompt + a, prompt + b, UNKNOWN, 1) for a, b in zip([at, *cuts], ends, strict=True)]
        at = end
    return places


def _cuts(start: int, end: int, prompt: int, turn_places: list[TurnPlace]) -> list[tuple[int, int]]:
    """Divide tokens `start` to `end` - 1 into pairs (start, end): the prompt, turns, and messages between turns."""
    edges = {start, end, *(edge for turn in turn_places for edge in (turn.start, turn.end) if start < edge < end)}
    edges |= {prompt} if start < prompt < end else set()
    return list(pairwise(sorted(edges)))


def _rewards(trajectory: Trajectory) -> Floats:
    """Return the reward of each token. Without `token_rewards`, the last sampled token gets the whole reward."""
    if trajectory.token_rewards:
        return floats(trajectory.token_rewards)
    rewards = np.zeros(trajectory.num_tokens, np.float32)
    rewards[np.flatnonzero(flags(trajectory.mask))[-1]] = trajectory.reward
    return rewards


def count_versions(versions: Ints) -> tuple[tuple[int, int], ...]:
    """Return (tokens, version) for consecutive tokens of one version. Example: [3, 3, 4] -> ((2, 3), (1, 4))."""
    return tuple((len(list(run)), version) for version, run in groupby(versions.tolist()))
