"""The tree of a run of several turns as `inspect` and the page draw it, and the column of turns that it is made of."""

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_archive import recorded

from streamppo.commands.look import inspect as inspection
from streamppo.commands.look import tree
from streamppo.commands.look.watching import trajectories as watching
from streamppo.queue.rules.slot import make_record
from streamppo.queue.rules.validation import defect
from streamppo.queue.store.columns import batch_columns, verify
from streamppo.rollout.endpoint.row import Row
from streamppo.rollout.endpoint.tree import NO_PLACE
from streamppo.rollout.engine import Completion
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Batch, Ints, TokenRecord, Trajectory, branches, encode, flags, ints, turns
from streamppo.types.turns import TurnPlace

ALPHABET = '0123456789+=[]{}<>/_":,. abcdefghijklmnopqrstuvwxyz'
HF = character_tokenizer(ALPHABET)


def ids(text: str) -> Ints:
    return np.array([3 + ALPHABET.index(one) for one in text], np.int32)


def spell(tokens: Ints) -> str:
    return cast(str, HF.decode(tokens.tolist(), skip_special_tokens=False))


def sampled(text: str, version: int, cached: int = 0) -> Completion:
    count = len(text)
    numbers = np.full(count, -0.5, np.float32), np.full(count, version, np.int32)
    return Completion(ids(text), *numbers, "stop", cached=cached)


def played() -> Trajectory:
    """Two turns, a second answer to the first context, a sub-agent, and an undelivered turn."""
    row = Row()
    opened, ended = row.add(NO_PLACE, ids("1+2="), sampled("a=", 3), 1)
    row.add(ended, ids("3="), sampled('<tool_call>{"name":"sum"}', 4, cached=5), 2)
    row.add(opened, ids(""), sampled("bb", 4, cached=3), 3)
    row.add(NO_PLACE, ids("[sub]"), sampled("ccc", 2), 4)
    row.add(ended, ids("no"), sampled("dd", 5, cached=6), 5)
    received = [1, 2, 3, 4]
    columns = row.columns(received)
    rewards = np.zeros(len(columns.tokens) - row.prompt, np.float32)
    rewards[1], rewards[-7] = 0.5, 1.0
    made = trajectory(columns.tokens[row.prompt :].tolist(), prompt=columns.tokens[: row.prompt].tolist())
    mask = columns.mask[row.prompt :]
    return replace(
        made,
        mask=mask.tobytes(),
        versions=columns.versions[row.prompt :].tobytes(),
        logprobs=columns.logprobs[row.prompt :].tobytes(),
        token_rewards=rewards.tobytes(),
        branches=columns.branches.tobytes(),
        turns=row.turn_column(received),
    )


TREE = played()
BATCH = Batch(version=5, min_version=3, trajectories=(TREE,))


def test_inspect_draws_messages_turns_branches_and_what_became_of_them() -> None:
    tokenizer = cast("Tokenizer", type("Spelling", (), {"spell": staticmethod(HF.decode)}))
    call = '<tool_call>{"name":"sum"}'
    lines = list(inspection._texts(BATCH, TREE, tokenizer))
    assert [re.sub(r"(?<=\S) +", " ", line[2:]) for line in lines] == [
        "tree 5 turns, 3 branches, 2 tokens not received",
        "  tokens 0 to 3 prompt '1+2='",
        "  tokens 4 to 5 turn 1 'a=': reward 0.5; versions 2 x 3; 0 of the 4 tokens before it were reused",
        "  tokens 6 to 7 message '3='",
        f"  tokens 8 to 32 turn 2 {call!r}: calls sum({{}}); reward 0; versions 25 x 4; "
        "5 of the 8 tokens before it were reused",
        "    tokens 33 to 33 again after token 2: '='",
        "    tokens 34 to 35 turn 3 'bb': reward 0; versions 2 x 4; 3 of the 4 tokens before it were reused",
        "  tokens 36 to 40 branch after nothing: '[sub]'",
        "  tokens 41 to 43 turn 4 'ccc': reward 1; versions 3 x 2; 3 tokens are too old; "
        "0 of the 5 tokens before it were reused",
        "    tokens 44 to 45 branch after token 5: 'no'",
        "    tokens 46 to 47 turn 5 'dd': not received, and not trained on; versions 2 x 5; "
        "6 of the 8 tokens before it were reused",
    ]
    assert len({line.index(" turn ") for line in lines if " turn " in line}) == 1, "names stand below each other"


def test_without_the_column_turns_are_those_of_the_mask() -> None:
    found = tree.nodes(BATCH, replace(TREE, turns=b""), spell)
    assert [(one.name, one.text) for one in found if one.kind == "turn"] == [
        ("turn 1", "a="),
        ("turn 2", '<tool_call>{"name":"sum"}'),
        ("turn 3", "bb"),
        ("turn 4", "ccc"),
    ]
    assert not any("reused" in note for one in found for note in one.notes())
    assert not tree.has_tree(trajectory([5, 6]))


@st.composite
def rows(draw: st.DrawFn) -> Trajectory:
    """A row of random branches and a random mask, as an environment, or an agent, leaves it."""
    prompt, count = draw(st.integers(1, 4)), draw(st.integers(2, 20))
    starts = sorted(draw(st.sets(st.integers(prompt, prompt + count - 2), max_size=5)))
    pairs = [(start, draw(st.integers(-1, start - 2))) for start in starts]
    mask = [draw(st.booleans()) and at + prompt not in starts for at in range(count - 1)] + [True]
    made = trajectory([5] * count, prompt=[6] * prompt, mask=mask)
    return replace(made, branches=branches.column(pairs))


@given(rows())
@settings(max_examples=100, deadline=None)
def test_nodes_are_the_whole_row_in_its_order_and_a_branch_stands_deeper_than_what_it_follows(one: Trajectory) -> None:
    found = tree.nodes(Batch(version=1, min_version=0, trajectories=(one,)), one, spell)
    prompt = len(one.prompt_tokens) // 4
    assert [node.start for node in found] == [0, *(node.end for node in found[:-1])]
    assert found[-1].end == prompt + one.num_tokens
    own = [at for node in found if node.kind == "turn" for at in range(node.start - prompt, node.end - prompt)]
    assert own == np.flatnonzero(flags(one.mask)).tolist()
    assert sum(node.reward for node in found) == pytest.approx(one.reward)
    for node in found:
        if node.parent >= 0:
            above = next(other for other in found if other.start <= node.parent < other.end)
            assert node.level == above.level + 1
    places = [TurnPlace(node.start, node.end, 0, 1) for node in found if node.kind == "turn"]
    assert turns.flaw(turns.column(places), prompt, flags(one.mask)) is None


def test_a_page_has_the_tree_in_words_and_the_token_to_go_to(tmp_path: Path) -> None:
    HF.save_pretrained(tmp_path)
    found = [watching._tree_row(node, 4) for node in tree.nodes(BATCH, TREE, spell)]
    assert [one["token"] for one in found[:4]] == [None, 0, 2, 4]
    assert found[-1] == {
        "kind": "turn",
        "name": "turn 5",
        "level": 1,
        "behind": "",
        "text": "dd",
        "notes": [
            "not received, and not trained on",
            "versions 2 x 5",
            "6 of the 8 tokens before it were reused",
        ],
        "received": False,
        "token": 42,
    }


# --- the column ----------------------------------------------------------------------------------------------


def test_turns_come_back_from_the_archive_and_other_rows_have_none(tmp_path: Path) -> None:
    plain = trajectory([5, 6])
    batch = Batch(version=3, min_version=0, trajectories=(TREE, plain))
    assert recorded(tmp_path, batch).batch(3) == batch
    assert b"turns" not in encode(plain) and make_record(TREE, None).turns == b""
    assert defect(TREE, None) is None and turns.undelivered(TREE.turns) == 2
    assert not any("turns" in name for name in batch_columns(replace(batch, trajectories=(plain,)), TokenRecord())[0])


FLAWS: dict[str, tuple[Any, str]] = {
    "half": (TREE.turns[:-3], "which are not 4 int32 each"),
    "before": ([(3, 5, 0, 1)], "a turn of tokens 3 to 4, where the row has 4 to"),
    "beyond": ([(4, 6, 0, 1), (8, 600, 0, 1)], "a turn of tokens 8 to 599"),
    "empty": ([(4, 4, 0, 1)], "a turn of tokens 4 to 3"),
    "backwards": ([(8, 33, 0, 1), (4, 6, 0, 1)], "a turn of tokens 4 to 5, where the row has 33 to"),
    "reuse": ([(4, 6, 5, 1)], "reused 5 tokens"),
    "negative": ([(4, 6, -1, 1)], "reused -1 tokens"),
    "delivery": ([(4, 6, 0, 2)], "a turn has delivered = 2"),
    "mask": ([(4, 6, 0, 1)], "the mask and the turns disagree"),
    "lost": ([*turns.read(TREE.turns)[:-2], (41, 44, 0, 0)], "disagree on whether token 41 is sampled"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_turns_that_are_not_those_of_the_row_are_refused_on_arrival_and_in_a_strangers_file(name: str) -> None:
    given, reason = FLAWS[name]
    bad = replace(TREE, turns=given if isinstance(given, bytes) else turns.column(TurnPlace(*one) for one in given))
    assert reason in (defect(bad, None) or "")
    assert "in a segment" in (defect(replace(TREE, branches=b"", finish="cut"), None) or "")
    if len(bad.turns) % 4:
        return
    columns, attributes = batch_columns(replace(BATCH, trajectories=(bad,)), TokenRecord())
    with pytest.raises(ValueError, match="turn"):
        verify(columns, attributes)


def test_sound_rows_have_places_that_rise() -> None:
    starts = ints(TREE.turns).reshape(-1, 4)[:, 0]
    assert (np.diff(starts) > 0).all()
