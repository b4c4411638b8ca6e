"""An update in which each rank has the tokens of its own rows alone is the update in which each has all of them."""

from pathlib import Path

import learner_case as case
import torch

from streamppo.learner.attention.tree import RowSizes
from streamppo.learner.batch.padded import pad
from streamppo.learner.batching import ActiveRows
from streamppo.queue.store import batch_parts

RECIPES = {
    "one step": ("learner.micro_batch_tokens=30",),
    "minibatches": ("learner.minibatches=3", "learner.epochs=2", "learner.micro_batch_tokens=30"),
    "a critic of its own, and a reference": (
        "algorithm.critic.model=policy",
        "algorithm.critic.minibatches=2",
        "algorithm.kl.loss_beta=0.1",
    ),
    "fewer rows than ranks in a step": ("learner.minibatches=12",),
}


def updates(ranks: int, folder: str) -> dict[str, list[list[torch.Tensor]]]:
    """By recipe, all parameters after an update of `ranks` ranks: with all tokens, and with those of their own rows."""
    return {
        name: [_updated(ranks, folder, options, own=own) for own in (False, True)] for name, options in RECIPES.items()
    }


def _updated(ranks: int, folder: str, options: tuple[str, ...], *, own: bool) -> list[torch.Tensor]:
    updater = case.updater(case.config_of(f"learner.ranks={ranks}", *options), Path(folder))
    whole = case.cut(case.batch())
    if own:
        outline = batch_parts.make_outline(whole)
        rows = updater.rank_rows(pad(batch_parts.join(outline, [])))
        whole = batch_parts.join(outline, batch_parts.select_tokens(whole, rows))
    case.metrics(updater, pad(whole))
    return [*case.whole(updater.policy).values()]


def test_weights_are_equal_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    made = case.by_ranks(updates, 2, tmp_path, str(folder))
    for name, (one, other) in made.items():
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), name


def test_a_rank_of_several_reads_a_part_of_the_rows_and_all_ranks_together_read_every_one(
    folder: Path, tmp_path: Path
) -> None:
    with case.group(0, 1, tmp_path / "store"):
        updater = case.updater(case.config_of(), folder)
    sizes, epochs = RowSizes(torch.arange(1, 65)), updater.objective.epochs
    every_B = torch.ones(64, dtype=torch.bool)
    active = ActiveRows(every_B, every_B, ~every_B)
    ranks = [updater.division._replace(rank=rank, ranks=4).rank_rows(sizes, 0, epochs, active) for rank in range(4)]
    assert {row for rows in ranks for row in rows} == set(range(64))
    assert all(len(rows) <= 17 for rows in ranks), "a quarter, and the row of an empty pass"
