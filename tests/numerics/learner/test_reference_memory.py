"""A reference that stands still is kept in the type that it computes in: the same log-probs, in half of the memory."""

from pathlib import Path

import learner_case as case
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from streamppo.learner import learner
from streamppo.learner.batch.padded import pad
from streamppo.learner.learner import Learner
from streamppo.learner.model import frozen, load_policy
from streamppo.learner.model import policy as model
from streamppo.learner.model.policy import Policy
from streamppo.weights.ledger import PublishReply

KL, BF16, MOVES = "algorithm.kl.loss_beta=0.1", "model.dtype=bfloat16", "algorithm.kl.follow_every=1"
pytestmark = pytest.mark.usefixtures("alone")


def loaded(folder: Path, *, master: bool) -> Policy:
    return load_policy.load(case.config_of(BF16).model, folder, 1.0, init_device_mesh("cpu", (1,)), master=master)


def dtype(one: Learner) -> torch.dtype:
    followed = frozen.separate_reference(one.updater.reference)
    assert followed is not None
    return next(followed.lm.parameters()).dtype


def test_weights_that_stand_still_score_as_those_of_float32_do_in_half_of_the_memory(folder: Path) -> None:
    rows = pad(case.batch())
    exact, light = (loaded(folder, master=master) for master in (True, False))
    size, half = (sum(model.local(one).nbytes for one in some.lm.parameters()) for some in (exact, light))
    assert half * 2 == size
    with torch.no_grad():
        expected, found = (one(rows, "policy") for one in (exact, light))
    assert torch.equal(expected.logprobs_BT, found.logprobs_BT) and expected.logprobs_BT.any()
    # Frequencies of rotary embeddings would not survive 8 bits.
    assert {one.dtype for one in light.lm.buffers()} == {torch.float32}


def publish(*_: object) -> PublishReply:
    raise AssertionError("nothing is pushed here")


def made(folder: Path, *overrides: str, resume_from: Path | None = None) -> Learner:
    config, mesh = case.config_of(BF16, KL, "learner.lr=0.01", *overrides), init_device_mesh("cpu", (1,))
    return learner.build(config, str(folder), mesh, publish, resume_from and str(resume_from))


def update(one: Learner) -> None:
    case.metrics(one.updater, pad(case.batch(version=one.version, min_version=0)))
    one.version += 1


def test_one_that_moves_or_has_moved_is_kept_in_float32(folder: Path, tmp_path: Path) -> None:
    assert dtype(made(folder)) == torch.bfloat16
    moving = made(folder, MOVES)
    assert dtype(moving) == torch.float32
    update(moving)
    moving.save(tmp_path)
    moving.saver.wait()
    stands = made(folder, resume_from=tmp_path / "00000001")
    followed, before = (
        frozen.separate_reference(stands.updater.reference),
        frozen.separate_reference(moving.updater.reference),
    )
    assert dtype(stands) == torch.float32 and followed is not None and before is not None
    assert all(
        torch.equal(one, other)
        for one, other in zip(case.whole(followed).values(), case.whole(before).values(), strict=True)
    )


def test_one_that_begins_to_move_is_read_again(folder: Path) -> None:
    one = made(folder)
    one.configure(case.config_of(BF16, KL, "learner.lr=0.01", MOVES))
    assert dtype(one) == torch.float32
    one.configure(case.config_of(BF16, KL, "learner.lr=0.01"))
    assert dtype(one) == torch.float32, "known, and maybe moved"
