"""A teacher that is a server teaches as the same model on the learner's ranks does, and no update asks it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from teacher_server import teaching
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.config.teacher import Teacher as TeacherConfig
from streamppo.errors import UpdateError
from streamppo.learner.batch.padded import pad
from streamppo.rollout.episode import Episode
from streamppo.rollout.teacher import TeacherClient
from streamppo.types import Batch, Trajectory, encode, flags, floats, ints

GONE = "algorithm.teacher.url=http://127.0.0.1:9"
"""A server that an update must not call."""
SIGNALS = {
    "advantage": ("algorithm.advantage.kind=rloo", "algorithm.teacher.others=0.5", "algorithm.teacher.weight=0.7"),
    "reward": ("algorithm.teacher.signal=reward", "algorithm.teacher.weight=0.7"),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that is not the policy, and of another size."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(11)
    Qwen2ForCausalLM(Qwen2Config(**{**case.SMALL, "hidden_size": 16}, initializer_range=0.3)).save_pretrained(folder)
    return folder


def episode(one: Trajectory) -> Episode:
    mask = flags(one.mask)
    columns = ints(one.tokens), floats(one.logprobs), ints(one.versions)
    return Episode(ints(one.prompt_tokens), *columns, mask, one.finish, (len(mask) - 1,))


async def _asked(url: str, batch: Batch) -> Batch:
    server = TeacherClient(TeacherConfig(url=url))
    columns = await asyncio.gather(*(server.score(episode(one)) for one in batch.trajectories))
    await server.close()
    pairs = zip(batch.trajectories, columns, strict=True)
    return replace(batch, trajectories=tuple(replace(one, teacher_logprobs=column) for one, column in pairs))


@pytest.fixture(scope="module")
def taught(teacher: Path) -> Iterator[Batch]:
    """The case's batch with the log-probs of a server, which is gone by then."""
    with teaching(teacher) as server:
        batch = asyncio.run(_asked(server.url, case.batch()))
    yield batch


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("signal", SIGNALS)
def test_by_url_an_update_is_that_of_the_same_model_on_the_rank(
    folder: Path, teacher: Path, taught: Batch, signal: str
) -> None:
    assert case.updater(case.config_of(GONE), folder).teacher is None
    here = case.updated(folder, pad(case.batch()), f"algorithm.teacher.model={teacher}", *SIGNALS[signal])
    there = case.updated(folder, pad(taught), GONE, *SIGNALS[signal])
    case.assert_same(here, there)
    assert there[1]["teacher_kl"] > 0.1
    plain = case.updated(folder, pad(case.batch()), "algorithm.advantage.kind=rloo")
    gap = max((there[0][name] - tensor).abs().max().item() for name, tensor in plain[0].items())
    assert gap > 1e-3, "the teacher makes a difference"


@pytest.mark.usefixtures("alone")
def test_micro_batches_padding_and_places_that_the_policy_did_not_sample_change_nothing(
    folder: Path, taught: Batch
) -> None:
    batch = pad(taught)
    assert batch.teacher_logprobs_BT is not None and not batch.mask_BT.all()
    choices = (GONE, *SIGNALS["advantage"], "learner.minibatches=2")
    whole = case.updated(folder, batch, *choices, "learner.micro_batch_tokens=100000")
    for budget in (1, 40):
        case.assert_same(whole, case.updated(folder, batch, *choices, f"learner.micro_batch_tokens={budget}"))
    spoiled_BT = batch.teacher_logprobs_BT.masked_fill(~batch.mask_BT, float("nan"))
    case.assert_same(whole, case.updated(folder, batch._replace(teacher_logprobs_BT=spoiled_BT), *choices))


def _by(ranks: int, folder: Path, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Parameters and metrics after one update by a group of `ranks`."""
    choices = (GONE, *SIGNALS["reward"], f"learner.ranks={ranks}", "learner.micro_batch_tokens=40")
    return case.updated(folder, pad(batch), *choices)


@pytest.mark.slow
def test_three_ranks_make_the_update_of_one(folder: Path, taught: Batch, tmp_path: Path) -> None:
    one, three = (case.by_ranks(_by, ranks, tmp_path, folder, taught) for ranks in (1, 3))
    case.assert_same(one, three)


# --- without log-probs ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_batch_in_which_some_or_all_trajectories_have_none_is_refused_and_never_taken_for_zero(
    folder: Path, taught: Batch
) -> None:
    lacking = replace(taught.trajectories[4], teacher_logprobs=b"")
    some = replace(taught, trajectories=(*taught.trajectories[:4], lacking, *taught.trajectories[5:]))
    for batch, count in ((some, 1), (case.batch(), case.BATCH)):
        updater = case.updater(case.config_of(GONE), folder)
        with pytest.raises(UpdateError, match=f"{count} of {case.BATCH} trajectories have no log-probs of a teacher"):
            updater.update(pad(batch))


@pytest.mark.usefixtures("alone")
def test_without_a_teacher_that_is_a_server_there_is_no_column_and_not_a_byte_of_it(
    folder: Path, teacher: Path, taught: Batch
) -> None:
    assert pad(case.batch()).teacher_logprobs_BT is None
    assert b"teacher" not in encode(case.batch())
    more = len(encode(taught)) - len(encode(case.batch()))
    tokens = sum(one.num_tokens for one in taught.trajectories)
    assert 4 * tokens < more < 4 * tokens + 24 * case.BATCH
    # An unrequested column teaches nothing: neither without a teacher nor beside a model on the rank.
    for choices in ((), (f"algorithm.teacher.model={teacher}", *SIGNALS["advantage"])):
        spoiled = pad(taught)
        assert spoiled.teacher_logprobs_BT is not None
        spoiled = spoiled._replace(teacher_logprobs_BT=spoiled.teacher_logprobs_BT - 3)
        case.assert_same(case.updated(folder, pad(case.batch()), *choices), case.updated(folder, spoiled, *choices))


def test_rows_of_a_padded_batch_keep_their_own_log_probs(taught: Batch) -> None:
    batch = pad(taught)
    rows = torch.tensor([7, 2])
    part = batch.select(rows)
    assert part.teacher_logprobs_BT is not None
    for row, number in enumerate(rows.tolist()):
        one = taught.trajectories[number]
        found = part.teacher_logprobs_BT[row, : one.num_tokens].numpy()
        assert np.array_equal(found, floats(one.teacher_logprobs))
        assert not part.teacher_logprobs_BT[row, one.num_tokens :].any()
