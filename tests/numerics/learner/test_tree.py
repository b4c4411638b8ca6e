"""A row whose tokens are a tree: the numbers of its paths, each token computed and trained once."""

from itertools import pairwise
from pathlib import Path

import fake_flash
import learner_case as case
import model_families
import numpy as np
import pytest
import torch
import tree_rows
from fake_flash import Call
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_attention import MAMBA
from test_routing import SGLANG, routed
from test_update import CHOICES
from torch.utils.flop_counter import FlopCounterMode
from transformers import FalconH1Config, FalconH1ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from streamppo.errors import ModelError
from streamppo.learner.attention import attention, tree
from streamppo.learner.batch.padded import Host, PaddedBatch, pad
from streamppo.learner.batching import micro_batches
from streamppo.learner.model import hf_files
from streamppo.learner.model.policy import Policy, PolicyOutput
from streamppo.queue.store import batch_parts
from streamppo.types import Batch, branches

ROWS = pad(tree_rows.batch())
WIDE = 10**9
"""The width of a model for which a tree is always less work than its paths."""
NARROW = 3
"""The width of a model for which a tree is sometimes less work."""


def policy(folder: Path, implementation: str = "sdpa", temperature: float = 0.7) -> Policy:
    """The model in `folder` with a critic that is not zero, in float32."""
    torch.manual_seed(9)
    made = Policy(hf_files.read(folder, implementation), temperature, layout=attention.layout(implementation))
    torch.nn.init.normal_(made.value_head.weight)
    return made


def gradients(made: Policy, rows: PaddedBatch) -> tuple[PolicyOutput, dict[str, torch.Tensor]]:
    """The scores of sampled tokens, and the gradient of a weighted sum of them."""
    scored, weights = made(rows, "both"), torch.Generator().manual_seed(1)
    own = [column.masked_fill(~rows.mask_BT, 0.0) for column in scored[:3]]
    total = sum((column * torch.rand(column.shape, generator=weights)).sum() for column in (*own, scored.bootstrap_B))
    assert isinstance(total, torch.Tensor)
    total.backward()
    found = {name: one.grad for name, one in made.named_parameters() if one.grad is not None}
    return PolicyOutput(*(one.detach() for one in (*own, scored.bootstrap_B))), found


def assert_scores_paths(made: Policy, plain: Policy, rows: PaddedBatch) -> None:
    scored, own = gradients(made, rows)
    expected, gradient = gradients(tree_rows.unroll(plain), rows)
    for name, column in expected._asdict().items():
        torch.testing.assert_close(
            getattr(scored, name), column, rtol=0, atol=5e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert own.keys() == gradient.keys()
    for name, one in gradient.items():
        torch.testing.assert_close(own[name], one, rtol=0, atol=1e-5 * one.abs().max().item() + 1e-7, msg=name)


# --- a pass ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_a_tree_has_the_scores_and_gradients_of_its_paths(
    folder: Path, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = fake_flash.install(monkeypatch)
    made = policy(folder, implementation)
    assert (made.masked_width is not None) is (implementation == "sdpa")
    assert_scores_paths(made, policy(folder), ROWS)
    assert bool(calls) is (implementation == "flash_attention_2")


@pytest.mark.parametrize("family", ["sliding", "FalconH1", "Qwen3Next", "Qwen3Moe", "Llama", "Gemma3Text"])
def test_every_kind_of_attention_reads_a_tree_as_its_paths(family: str, tmp_path: Path) -> None:
    if family == "sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
        Qwen2ForCausalLM(Qwen2Config(**case.SMALL, **sliding, initializer_range=0.3)).save_pretrained(tmp_path)
    elif family == "FalconH1":
        hybrid = FalconH1Config(**case.SMALL, **MAMBA, mamba_n_groups=1, initializer_range=0.3)
        FalconH1ForCausalLM(hybrid).save_pretrained(tmp_path)
    else:
        model_families.make(family, tmp_path)
    made = policy(tmp_path)
    assert (made.masked_width is not None) is (family in ("Qwen3Moe", "Llama"))
    assert_scores_paths(made, policy(tmp_path), ROWS)


# --- an update -----------------------------------------------------------------------------------------------------


def stepped(folder: Path, rows: PaddedBatch, *overrides: str, by_paths: bool) -> tuple[case.Weights, dict[str, float]]:
    updater = case.updater(case.config_of(*overrides), folder)
    if by_paths:
        for model in (updater.policy, updater.reference, updater.teacher):
            if isinstance(model, Policy):
                tree_rows.unroll(model)
    found = case.metrics(updater, rows)
    return case.whole(updater.policy), found


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
def test_a_step_is_that_on_its_paths_by_hand_for_every_choice(folder: Path, choice: list[str]) -> None:
    two_steps = ["learner.minibatches=2", *choice]
    made, expected = (stepped(folder, ROWS, *two_steps, by_paths=by_paths) for by_paths in (False, True))
    case.assert_same(made, expected)
    assert made[1]["grad_norm"] > 0
    assert made[1]["tokens"] == sum(one.num_sampled for one in tree_rows.batch().trajectories)


TWICE = ("learner.minibatches=2", "algorithm.critic.model=policy", "algorithm.kl.loss_beta=0.1")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_micro_batches_change_nothing(folder: Path) -> None:
    whole, *split = (
        stepped(folder, ROWS, *TWICE, f"learner.micro_batch_tokens={budget}", by_paths=False)
        for budget in (100000, 40, 1)
    )
    for one in split:
        case.assert_same(whole, one)


def _made(ranks: int, folder: Path) -> list[tuple[case.Weights, dict[str, float]]]:
    choices = (*TWICE, f"learner.ranks={ranks}", "learner.micro_batch_tokens=60")
    return [stepped(folder, ROWS, *choices, f"model.attention={name}", by_paths=False) for name in ("sdpa", "eager")]


@pytest.mark.slow
def test_ranks_and_attention_change_nothing(folder: Path, tmp_path: Path) -> None:
    first, *others = (one for ranks in (1, 2) for one in case.by_ranks(_made, ranks, tmp_path, folder))
    for one in others:
        case.assert_same(first, one)


@pytest.mark.usefixtures("alone")
def test_a_branch_behind_the_token_before_it_is_the_linear_row(folder: Path) -> None:
    linear = pad(tree_rows.batch(linear=1))
    ends = zip(linear.start_B.tolist(), linear.length_B.tolist(), strict=True)
    columns = tuple(branches.column([(at, at - 1) for at in range(start, start + count, 2)]) for start, count in ends)
    for attends in ("sdpa", "eager"):
        choices = (*TWICE, f"model.attention={attends}")
        plain = stepped(folder, linear, *choices, by_paths=False)
        case.assert_same(stepped(folder, linear._replace(branches=columns), *choices, by_paths=False), plain, rel=1e-4)


# --- what is computed ------------------------------------------------------------------------------------------------


@st.composite
def columns_of(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Branches and widths of a few rows."""
    widths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    made: list[list[tuple[int, int]]] = []
    for width in widths:
        starts = sorted(draw(st.sets(st.integers(1, width - 1), max_size=6))) if width > 1 else []
        made.append([(start, draw(st.integers(-1, start - 2))) for start in starts])
    made[0] = made[0] or [(1, -1)] * (widths[0] > 1)
    return made, widths


WAYS = (
    (attention.padded, WIDE),
    (attention.padded, NARROW),
    (attention.padded, None),
    (attention.joined, None),
)
"""Layouts, with the width of a model whose trees may be masked."""


def host_of(pairs: list[list[tuple[int, int]]], widths: list[int]) -> Host:
    """Rows of different tokens; each prompt is one token."""
    width_B = torch.tensor(widths)
    inputs_BL = torch.arange(len(widths) * max(widths)).view(len(widths), -1) + 1
    columns = torch.ones_like(width_B), width_B - 1, torch.zeros_like(width_B), torch.zeros_like(width_B)
    return Host(inputs_BL, *columns, branches=tuple(map(branches.column, pairs)))


@given(columns_of(), st.sampled_from([WIDE, NARROW]))
@settings(max_examples=300, deadline=None)
def test_a_token_sees_those_that_it_follows_and_its_position_is_their_number(
    rows: tuple[list[list[tuple[int, int]]], list[int]], hidden: int
) -> None:
    host = host_of(*rows)
    reading = tree.lay_out(host, attention.padded, hidden)
    assume("attention_mask" in reading.arguments)
    tokens_N, position_N, sees_GWW = (
        reading.arguments["input_ids"].flatten(),
        reading.arguments["position_ids"].flatten(),
        reading.arguments["attention_mask"][:, 0],
    )
    G, W, _ = sees_GWW.shape
    assert sees_GWW.any(-1).all(), "a token that sees nothing has no softmax"
    assert reading.source_N is not None
    if hidden == WIDE:
        assert (reading.source_N >= 0).sum() == sum(rows[1]), "no token is computed twice"
        assert sum(len(branches.trees(branches.column(one), width)) for one, width in zip(*rows, strict=True)) == G
    for row, (pairs, width) in enumerate(zip(*rows, strict=True)):
        follows = [dict(pairs).get(token, token - 1) for token in range(width)]
        for token in range(width):
            chain = [token]
            while follows[chain[0]] >= 0:
                chain.insert(0, follows[chain[0]])
            place = int(reading.index_BL[row, token])
            assert tokens_N[place] == host.inputs_BL[row, token]
            assert position_N[place] == len(chain) - 1
            line, at = divmod(place, W)
            seen = line * W + sees_GWW[line, at].nonzero().flatten()
            assert tokens_N[seen].tolist() == host.inputs_BL[row, chain].tolist()


@given(columns_of(), st.sampled_from([attention.padded, attention.joined]))
@settings(max_examples=150, deadline=None)
def test_a_path_is_a_linear_row_and_a_tokens_result_is_of_the_first(
    rows: tuple[list[list[tuple[int, int]]], list[int]], layout: attention.Layout
) -> None:
    host = host_of(*rows)
    reading = tree.lay_out(host, layout, None)
    assert "attention_mask" not in reading.arguments
    # Lines are in the order of roots, and then of last tokens.
    leaves = sorted(tree_rows.leaves_of(host.branches or (), rows[1]), key=lambda leaf: (leaf.row, leaf.path[0]))
    lines = _lines(reading, [len(leaf.path) for leaf in leaves])
    for leaf, line in zip(leaves, lines, strict=True):
        assert [token for token, _ in line] == host.inputs_BL[leaf.row, leaf.path].tolist()
        for at, token in enumerate(leaf.path):
            if token in leaf.own:
                assert int(reading.index_BL[leaf.row, token]) == line[at][1]


def _lines(reading: attention.RowLayout, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Each line's tokens with their places; a joined line begins where positions do."""
    tokens_GW = reading.arguments["input_ids"]
    placed = [(token, place) for place, token in enumerate(tokens_GW.flatten().tolist())]
    if len(tokens_GW) == len(lengths) and "cu_seq_lens_q" not in reading.arguments:
        return [placed[n * tokens_GW.shape[1] :][:length] for n, length in enumerate(lengths)]
    bounds = reading.arguments["cu_seq_lens_q"].tolist()
    assert reading.arguments["position_ids"][0, bounds[:-1]].eq(0).all()
    return [placed[begin:end] for begin, end in pairwise(bounds)]


def shared(context: int, count: int, turn: int) -> Batch:
    """One trajectory: `count` answers of `turn` tokens to one context; each but the first repeats its last token."""
    pairs = [(context + turn + at * (turn + 1), context - 2) for at in range(count - 1)]
    tokens = context + turn + (count - 1) * (turn + 1) - 1
    mask = np.ones(tokens, np.bool_)
    mask[[start - 1 for start, _ in pairs]] = False
    mask[: context - 1] = False
    one = replace(
        tree_rows.batch().trajectories[1],
        prompt_tokens=np.full(1, 3, np.int32).tobytes(),
        tokens=np.resize(np.arange(2, 17, dtype=np.int32), tokens).tobytes(),
        logprobs=np.full(tokens, -1.0, np.float32).tobytes(),
        versions=np.full(tokens, 2, np.int32).tobytes(),
        mask=mask.tobytes(),
        branches=branches.column(pairs),
    )
    return Batch(version=3, min_version=0, trajectories=(one,))


def test_a_context_of_1000_tokens_that_8_answers_share_is_computed_once(folder: Path) -> None:
    rows = pad(shared(1000, 8, 20))
    assert rows.branches is not None
    assert branches.flaw(rows.branches[0], 1, rows.mask_BT[0].numpy()) is None
    once, by_paths = policy(folder), tree_rows.unroll(policy(folder))
    products: list[int] = []
    for made in (once, by_paths):
        with FlopCounterMode(display=False) as counter:
            made(rows, "policy").logprobs_BT[rows.mask_BT].sum().backward()
        counts = counter.get_flop_counts()["Global"]
        products.append(sum(flops for name, flops in counts.items() if "attention" not in str(name)))
    # 1,000 + 8 * 20 + 7 tokens beside 8 * 1,020, in all matrix products but those of attention and the head.
    assert products[0] < 0.2 * products[1]
    assert policy(folder).sizes(rows.on_host) == tree.RowSizes(torch.tensor([1167]), None, torch.tensor([1]))


def test_many_short_paths_are_not_one_wide_square(folder: Path) -> None:
    turns, context, made = 60, 20, policy(folder)
    rows = pad(shared(context, turns, 20))
    reading = tree.lay_out(rows.on_host, attention.padded, made.masked_width)
    # Sixty paths of 40 tokens in place of 1,279 tokens that look at as many.
    assert reading.arguments["input_ids"].shape == (turns, 40) and "attention_mask" not in reading.arguments
    assert tree.lay_out(rows.on_host, attention.padded, WIDE).arguments["input_ids"].shape == (1, 1279)


@pytest.mark.slow
@given(columns_of())
@settings(max_examples=150, deadline=None)
def test_the_sizes_for_micro_batches_are_those_of_the_lines(
    rows: tuple[list[list[tuple[int, int]]], list[int]],
) -> None:
    host = host_of(*rows)
    for layout, hidden in WAYS:
        tokens_B, _, lines_B = tree.sizes(host, layout, hidden)
        alone = [
            tree.lay_out(host.select(torch.tensor([row])), layout, hidden)
            for row in range(len(rows[1]))
            if rows[0][row]
        ]
        shapes = [one.arguments["input_ids"].shape for one in alone]
        some = torch.tensor([bool(one) for one in rows[0]])
        lines = torch.ones_like(tokens_B) if lines_B is None else lines_B
        assert [(int(n), int(w)) for n, w in zip(lines[some], tokens_B[some], strict=True)] == [
            tuple(one) for one in shapes
        ]
        assert tokens_B[~some].tolist() == [width for width, one in zip(rows[1], rows[0], strict=True) if not one]


def test_a_micro_batch_of_paths_keeps_to_its_budget() -> None:
    tokens_B, lines_B = torch.tensor([10, 9, 8, 8, 2]), torch.tensor([3, 1, 4, 1, 1])
    (made,) = micro_batches(torch.arange(5), tokens_B, 40, 1, lines_B=lines_B)
    assert [one.tolist() for one in made] == [[0, 1], [2, 3], [4]]
    assert all(int(tokens_B[one].max() * lines_B[one].sum()) <= 40 for one in made)


@pytest.mark.parametrize("choice", ["detach_context", "slices"])
def test_choices_that_compute_rows_as_lines_refuse_a_tree_by_name(folder: Path, choice: str) -> None:
    made = policy(folder)
    if choice == "detach_context":
        made.detach_context = True
    else:
        made.slices = made.slices._replace(ranks=2)
    with pytest.raises(ModelError, match=r"rows with branches do not support queue.segments, learner.mesh.context"):
        made(ROWS, "policy")


# --- candidates, experts, ranks ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_candidates_are_those_of_each_token_in_a_tree_and_in_its_paths(folder: Path) -> None:
    rows = pad(case.cut(tree_rows.batch()))
    made, paths = (stepped(folder, rows, f"model.attention={name}", by_paths=False) for name in ("sdpa", "eager"))
    case.assert_same(made, paths)
    whole = stepped(folder, ROWS, "model.attention=sdpa", by_paths=False)
    assert made[1]["entropy"] < whole[1]["entropy"]


@pytest.mark.usefixtures("alone")
def test_a_token_has_the_engines_experts_wherever_it_is_computed(tmp_path: Path) -> None:
    model_families.make("Qwen3Moe", tmp_path)
    rows = pad(routed(tree_rows.batch()))
    results = [
        stepped(tmp_path, rows, *SGLANG, f"model.attention={name}", by_paths=False) for name in ("sdpa", "eager")
    ]
    case.assert_same(*results)
    assert 0 < results[0][1]["routes_own"] < 1, "some of the engine's choices are not the routers' own"
    own = stepped(tmp_path, rows, *SGLANG[:1], "model.attention=sdpa", by_paths=False)
    assert abs(own[1]["log_ppl_learner"] - results[0][1]["log_ppl_learner"]) > 1e-3


def test_a_rank_divides_a_batch_alike_before_and_after_it_has_the_tokens(folder: Path) -> None:
    batch = tree_rows.batch()
    for implementation in ("sdpa", "eager"):
        made = policy(folder, implementation)
        outline = pad(batch_parts.join(batch_parts.make_outline(batch), []))
        known, whole = made.sizes(outline.on_host), made.sizes(pad(batch).on_host)
        assert known.lines_B is not None and whole.lines_B is not None
        assert torch.equal(known.tokens_B, whole.tokens_B) and torch.equal(known.lines_B, whole.lines_B)


@given(columns_of(), st.sampled_from(WAYS))
@settings(max_examples=150, deadline=None)
def test_the_source_of_each_token_is_its_place_in_the_rows(
    rows: tuple[list[list[tuple[int, int]]], list[int]], way: tuple[attention.Layout, int | None]
) -> None:
    host = host_of(*rows)
    reading = tree.lay_out(host, *way)
    tokens_N, source_N = reading.arguments["input_ids"].flatten(), reading.source_N
    assert source_N is not None
    assert torch.equal(tokens_N, torch.where(source_N < 0, 0, host.inputs_BL.flatten()[source_N]))
    index_BL = torch.arange(host.inputs_BL.numel()).view_as(host.inputs_BL)
    real_BL = torch.arange(host.inputs_BL.shape[1]) < torch.tensor(rows[1])[:, None]
    assert torch.equal(source_N[reading.index_BL[real_BL]], index_BL[real_BL])
