"""Branches: a row's tokens as a tree, from its column to the archive and back; other columns are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import COUNTERS, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_archive import recorded

from streamppo.commands.look.watching import trajectories as watching
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import pad
from streamppo.queue.rules.records import Changes, SavedSlot
from streamppo.queue.rules.slot import make_record
from streamppo.queue.rules.validation import TokenLimits, defect, defects
from streamppo.queue.store import batch_parts
from streamppo.queue.store.columns import batch_columns, to_batch, verify
from streamppo.queue.store.journal import Journal
from streamppo.queue.token_limits import read_token_limits
from streamppo.types import Batch, TokenRecord, Trajectory, branches, encode

PROMPT, MASK = (3, 4, 5), [False, True, False, True, False, True]
"""Tokens 0 to 2 of the row, and tokens 3 to 8: those at 4, 6 and 8 are sampled."""


def branched(*pairs: tuple[int, int]) -> Trajectory:
    made = trajectory([5, 6, 7, 8, 9, 10], prompt=PROMPT, mask=MASK)
    return replace(made, branches=branches.column(list(pairs)))


TREE = branched((5, 1), (7, -1))


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, list[bool]]:
    """Branches of a random row, the tokens of its prompt, and its completion's mask."""
    prompt, completion = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    starts = sorted(draw(st.sets(st.integers(prompt, prompt + completion - 1), max_size=6)))
    pairs = [(start, draw(st.integers(-1, start - 2))) for start in starts]
    sampled = draw(st.lists(st.booleans(), min_size=completion, max_size=completion))
    return pairs, prompt, [one and at + prompt not in starts for at, one in enumerate(sampled)]


@given(rows())
@settings(max_examples=200, deadline=None)
def test_depths_paths_and_trees_are_those_of_tokens_followed_one_by_one(
    row: tuple[list[tuple[int, int]], int, list[bool]],
) -> None:
    pairs, prompt, mask = row
    width, column = prompt + len(mask), branches.column(pairs)
    assert branches.flaw(column, prompt, np.array(mask)) is None
    follows = [dict(pairs).get(token, token - 1) for token in range(width)]
    chains: list[list[int]] = []
    for token, before in enumerate(follows):
        chains.append([*(chains[before] if before >= 0 else []), token])
    assert branches.depths(column, width).tolist() == [len(chain) - 1 for chain in chains]
    leaves = sorted(set(range(width)) - set(follows))
    assert [path.tolist() for path in branches.paths(column, width)] == [chains[leaf] for leaf in leaves]
    roots = [chain[0] for chain in chains]
    assert [(one.tokens, one.paths) for one in branches.sizes(column, width)] == [
        (roots.count(root), [len(chains[leaf]) for leaf in leaves if roots[leaf] == root])
        for root in sorted(set(roots))
    ]
    assert [tree.tolist() for tree in branches.trees(column, width)] == [
        [token for token in range(width) if roots[token] == root] for root in sorted(set(roots))
    ]


# --- what is refused -------------------------------------------------------------------------------------------

FLAWS = [
    ([(5,)], "branches of 4 bytes, which are not pairs of int32"),
    ([(2, 0)], "a branch begins at token 2, but the completion's tokens are 3 to 8"),
    ([(9, 0)], "a branch begins at token 9, but the completion's tokens are 3 to 8"),
    ([(7, 0), (5, 0)], "a branch that begins at token 5 is listed after one that begins at token 7"),
    ([(5, 0), (5, 1)], "a branch that begins at token 5 is listed after one that begins at token 5"),
    ([(5, 5)], "the branch at token 5 follows token 5, which is neither before it nor -1"),
    ([(5, 7)], "the branch at token 5 follows token 7, which is neither before it nor -1"),
    ([(5, -2)], "the branch at token 5 follows token -2, which is neither before it nor -1"),
    ([(5, 4)], "the branch at token 5 follows the token before it, as without a branch"),
    ([(5, 1), (6, 1)], "the branch at token 6 begins with a token that the policy sampled"),
]


@pytest.mark.parametrize(("pairs", "reason"), FLAWS, ids=[reason for _, reason in FLAWS])
def test_branches_that_make_no_tree_are_refused_at_arrival_and_in_a_file(
    pairs: list[tuple[int, ...]], reason: str
) -> None:
    bad = replace(TREE, branches=np.array(pairs, np.int32).tobytes())
    assert defect(bad, None) == reason
    assert defects([TREE, bad], None) == [None, reason]
    columns, attributes = batch_columns(Batch(version=3, min_version=0, trajectories=(TREE, bad)), TokenRecord())
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        verify(columns, attributes)


def test_a_segment_has_no_branches() -> None:
    for change in ({"finish": "cut"}, {"prefix": 1}, {"identity": replace(TREE.identity, segment=1)}):
        assert defect(replace(TREE, **change), None) == "branches in a segment of a completion"


def test_a_configuration_that_takes_no_branches_names_its_choice(
    math_config: Callable[..., Config], folder: Path
) -> None:
    for choice, overrides in {
        "queue.segments": (
            "queue.segments.max_tokens=8",
            "algorithm.critic.model=head",
            "algorithm.advantage.kind=gae",
        ),
        "learner.mesh.context = 2": ("learner.mesh.context=2", "learner.ranks=2"),
        "learner.mesh.tensor = 2": ("learner.mesh.tensor=2", "learner.ranks=2"),
    }.items():
        limits = read_token_limits(math_config(*overrides), str(folder))
        limits = limits._replace(prompt=None)
        assert defect(TREE, limits) == f"its tokens have branches, which {choice} does not support"
        assert defects([TREE], limits) == [defect(TREE, limits)]
    limits = read_token_limits(math_config("rollout.max_tokens=6"), str(folder))
    assert defect(TREE, limits._replace(prompt=None)) is None


# --- from the journal to the archive and back ------------------------------------------------------------------


def test_branches_come_back_from_the_archive_and_linear_rows_have_no_column_of_them(tmp_path: Path) -> None:
    plain = trajectory([5, 6], mask=[True, True])
    mixed = Batch(version=3, min_version=0, trajectories=(plain, TREE, branched((3, 1)), plain))
    linear = Batch(version=4, min_version=0, trajectories=(plain, plain))
    made = recorded(tmp_path, mixed, linear)
    assert made.batch(3) == mixed and made.batch(4) == linear
    assert made.table(3).column("branches").to_pylist() == [[], [5, 1, 7, -1], [3, 1], []]
    assert not any("branches" in name for name in made.columns(4))
    assert to_batch(*batch_columns(mixed, TokenRecord())) == mixed
    assert b"branches" not in encode(plain), "nor has the journal"


def test_branches_come_back_from_the_journal_and_make_the_same_batch_as_from_the_archive(tmp_path: Path) -> None:
    slots = tuple(
        SavedSlot(number=n, identity=one.identity, actor=None, call=0, failures=0, trajectory=one)
        for n, one in enumerate([TREE, branched((3, 1))])
    )
    (tmp_path / "waiting").mkdir()
    Journal(tmp_path / "waiting" / "journal.sqlite").write(Changes(COUNTERS, slots))
    waiting = [one.trajectory for one in Journal(tmp_path / "waiting" / "journal.sqlite").slots()]
    batch = Batch(version=3, min_version=0, trajectories=tuple(one for one in waiting if one is not None))
    assert batch.trajectories == tuple(one.trajectory for one in slots)
    taken, replayed = pad(batch), pad(recorded(tmp_path, batch).batch(3))
    assert taken.branches == replayed.branches == (TREE.branches, branches.column([(3, 1)]))
    assert all(torch.equal(one, other) for one, other in zip(taken, replayed, strict=True) if torch.is_tensor(one))
    assert taken.select(torch.tensor([1])).branches == (branches.column([(3, 1)]),)
    linear = pad(Batch(version=3, min_version=0, trajectories=(trajectory([5]), TREE))).select(torch.tensor([0]))
    assert linear.branches is None, "a micro-batch of linear rows is computed as without branches"


def test_every_rank_has_the_branches_of_all_rows_and_a_record_has_none() -> None:
    batch = Batch(version=3, min_version=0, trajectories=(TREE, trajectory([5])))
    outline = batch_parts.make_outline(batch)
    assert batch_parts.join(outline, []).trajectories[0].branches == TREE.branches
    assert batch_parts.join(outline, batch_parts.select_tokens(batch, [0, 1])) == batch
    assert make_record(TREE, None).branches == b""


def test_branches_that_are_no_tree_do_not_hide_among_sound_rows() -> None:
    sound = [branched((5, 1)) for _ in range(3)]
    assert defects(sound, TokenLimits(17, 9, None)) == [None] * 3
    assert defects([*sound, branched((6, 1))], TokenLimits(17, 9, None))[3] is not None


# --- for people --------------------------------------------------------------------------------------------------


def test_watch_shows_the_branch_of_each_token() -> None:
    one, linear = replace(TREE, token_rewards=b""), trajectory([5, 6])
    batch = Batch(version=3, min_version=0, trajectories=(one, linear))
    columns = {column["name"]: column["values"] for column in watching._columns(batch, one, {})}
    assert columns["branch"] == [None, 0.0, None, 1.0, None, 2.0]
    assert "branch" not in {column["name"] for column in watching._columns(batch, linear, {})}
