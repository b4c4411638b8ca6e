"""builtin:tiny is taught until its greedy answers are right often enough, and is the same model for a seed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamppo.config.sections import Config
from streamppo.learner.model import tiny
from streamppo.learner.model.tiny import IGNORED, Problems
from streamppo.telemetry import host


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings", [(), ("seed=7", "model.tiny.hidden_size=32"), ("model.tiny.layers=3",)], ids=["as shipped", "32", "3"]
)
def test_its_bits_do_not_depend_on_the_number_of_threads(
    settings: tuple[str, ...], math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = math_config("model.tiny.target_accuracy=1", "model.tiny.max_steps=4", *settings)
    for threads in (1, 2, 4):
        monkeypatch.setattr(host, "cores", lambda cores=threads: cores)
        tiny.make(config, tmp_path / str(threads))
        assert torch.get_num_threads() == 1, "of the tests"
    assert weights(tmp_path / "1") == weights(tmp_path / "2") == weights(tmp_path / "4")


@pytest.mark.slow
def test_checks_that_are_left_out_change_no_weight(
    math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = math_config("model.tiny.target_accuracy=0.04", "model.tiny.max_steps=60")
    checks: list[Problems] = []
    accuracy = tiny._accuracy
    monkeypatch.setattr(tiny, "_accuracy", lambda *given: checks.append(given[1]) or accuracy(*given))
    tiny.make(config, tmp_path / "some")
    some = len(checks)
    monkeypatch.setattr(tiny, "_may_pass", lambda before, target: True)
    tiny.make(config, tmp_path / "every")
    assert weights(tmp_path / "some") == weights(tmp_path / "every")
    assert some < (len(checks) - some) / 2, "most checks are left out"


def test_a_step_reads_the_problems_that_it_picks_cut_to_the_longest_of_them() -> None:
    inputs_NL = torch.tensor([[5, 6, 7, 0], [5, 8, 0, 0], [9, 9, 9, 9]])
    labels_NL = torch.tensor([[IGNORED, 6, 7, IGNORED], [IGNORED, 8, IGNORED, IGNORED], [IGNORED, IGNORED, 9, 9]])
    picked = Problems(inputs_NL, labels_NL, torch.tensor([3, 2, 4])).at(torch.tensor([1, 0, 1]))
    assert picked.inputs_NL.tolist() == [[5, 8, 0], [5, 6, 7], [5, 8, 0]]
    assert picked.labels_NL.tolist()[1] == [IGNORED, 6, 7]
    assert picked.length_N.tolist() == [2, 3, 2]
