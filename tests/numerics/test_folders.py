"""Users' model folders, templates and rows are trained as transformers reads them, or are refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_draw as draws
import folder_faults
import folder_play
import folder_rows
import learner_case
import model_folders
import numpy as np
import pytest
from transformers.utils import logging

from streamppo.learner.model import hf_files
from streamppo.rollout import player
from streamppo.tasks.tokenizer import Tokenizer

USUAL = draws.Draw(
    number=0,
    family="qwen3",
    tokenizer="added",
    template="qwen2.5",
    tied=True,
    dtype="float32",
    layout="single",
    generation="published",
    spare=0,
    rows="messages",
    reward="trajectory",
    turns=2,
)
"""A draw without anything unusual."""
SLICE = 10
"""Draws of the campaign that the default tests play."""
SEED = 42


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone, for all draws."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    with learner_case.group(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield
    logging.set_verbosity(before)


def of(family: str, **changes: object) -> draws.Draw:
    """The family as it is published."""
    usual = model_folders.usual(family)
    talks = usual.template is not None
    made = replace(
        USUAL,
        family=family,
        tokenizer=usual.tokenizer,
        template=usual.template,
        tied=usual.tied,
        rows="messages" if talks else "text",
        turns=2 if talks else 1,
    )
    return replace(made, **changes)


# --- families, each with its own kind of tokenizer --------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", model_folders.FAMILIES)
def test_a_family_with_its_own_tokenizer_and_template_is_trained_exported_and_loaded(
    family: str, tmp_path: Path
) -> None:
    found = folder_play.play(of(family), tmp_path)
    assert (found.outcome, found.wrong) == ("passes", []), found.sentence
    assert found.two_turns or model_folders.usual(family).template is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokenizer", model_folders.TOKENIZERS)
def test_every_kind_of_tokenizer_goes_through_training_and_export(tokenizer: str, tmp_path: Path) -> None:
    found = folder_play.play(of("qwen3", tokenizer=tokenizer), tmp_path)
    assert (found.outcome, found.wrong) == ("passes", []), found.sentence


@pytest.mark.sampled(2)
@pytest.mark.parametrize("template", [one for one in model_folders.TEMPLATES if one])
def test_every_chat_template_plays_two_turns(template: str, tmp_path: Path) -> None:
    found = folder_play.play(of("llama3", tokenizer="byte_bpe", template=template), tmp_path)
    assert (found.outcome, found.wrong) == ("passes", []), found.sentence
    assert found.two_turns


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fault", sorted(folder_faults.FAULTS))
def test_a_fault_of_a_folder_is_refused_by_check_in_its_own_words(fault: str, tmp_path: Path) -> None:
    found = folder_play.play(of("qwen3", fault=fault, tied=fault != "missing_head"), tmp_path)
    assert (found.outcome, found.wrong) == ("refused", [])


@pytest.mark.parametrize("fault", sorted(folder_rows.FAULTS))
def test_a_fault_of_rows_is_refused_by_check_in_its_own_words(fault: str, tmp_path: Path) -> None:
    found = folder_play.play(of("qwen3", row_fault=fault, rows="text", turns=1), tmp_path)
    assert (found.outcome, found.wrong) == ("refused", [])


# --- the campaign -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(SLICE))
def test_a_draw_of_the_campaign_trains_or_is_refused_in_a_sentence_that_names_the_remedy(
    number: int, tmp_path: Path
) -> None:
    found = folder_play.play(draws.draw(SEED, number), tmp_path)
    assert found.wrong == [], found.draw


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_draw_of_two_hundred_is_silently_wrong(tmp_path: Path) -> None:
    found = [folder_play.play(draws.draw(SEED, number), tmp_path / str(number)) for number in range(200)]
    assert [(one.draw, one.wrong) for one in found if one.silent] == []
    assert min(sum(one.outcome == outcome for one in found) for outcome in ("passes", "refused")) >= 50


def test_a_campaign_draws_every_kind_of_everything() -> None:
    drawn = [draws.draw(SEED, number) for number in range(1500)]
    assert {one.family for one in drawn} == set(model_folders.FAMILIES)
    assert {one.tokenizer for one in drawn} == set(model_folders.TOKENIZERS)
    assert {one.template for one in drawn} == set(model_folders.TEMPLATES)
    assert {one.layout for one in drawn} == set(model_folders.LAYOUTS)
    assert {one.rows for one in drawn} == set(folder_rows.FORMATS)
    faults = {*folder_faults.FAULTS, *folder_faults.ODDITIES, ""}
    assert {one.fault for one in drawn} == faults
    assert {one.row_fault for one in drawn} == {*folder_rows.FAULTS, ""}
    assert draws.REMEDIES.keys() == folder_faults.FAULTS.keys()


# --- the campaign sees the faults that it is for ------------------------------------------------------------------


def test_the_campaign_sees_an_export_of_the_first_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = hf_files.export

    def of_the_start(weights: object, start: str, *given: Any) -> tuple[str, ...]:
        return export(dict(hf_files.read(start, "eager").named_parameters()), start, *given)

    monkeypatch.setattr(hf_files, "export", of_the_start)
    found = folder_play.play(USUAL, tmp_path)
    assert "export: the weights are those of the start" in found.wrong


def test_the_campaign_sees_a_token_that_an_observation_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observation = Tokenizer.observation
    monkeypatch.setattr(Tokenizer, "observation", lambda *given, **named: observation(*given, **named)[1:])
    found = folder_play.play(USUAL, tmp_path)
    assert [one for one in found.wrong if one.startswith("observation: ")]


def test_the_campaign_sees_log_probs_of_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_turn = player.one_turn
    monkeypatch.setattr(
        player,
        "one_turn",
        lambda prompt, done: one_turn(prompt, done._replace(logprobs=done.logprobs - np.float32(0.01))),
    )
    found = folder_play.play(replace(USUAL, turns=1), tmp_path)
    assert [one for one in found.wrong if one.startswith("engine at version 0: ")]


def test_the_campaign_sees_a_reward_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_play, "REWARD", folder_play.REWARD.replace("/ 4", "/ 0"))
    found = folder_play.play(USUAL, tmp_path)
    assert [one for one in found.wrong if one.startswith("a trajectory failed: RewardFailed")]


def test_the_campaign_sees_a_fault_that_check_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_play, "refusal", lambda path: "")
    assert folder_play.play(of("qwen3", fault="missing_shard"), tmp_path).outcome == "failed"
    monkeypatch.setattr(folder_play, "refusal", lambda path: "something is wrong")
    assert folder_play.play(of("qwen3", fault="missing_shard"), tmp_path).outcome == "failed"
