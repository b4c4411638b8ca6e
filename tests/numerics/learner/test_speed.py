"""Tokens and operations of an update, counted by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learner_case as case
import pytest
import torch

from streamppo.learner import update_metrics as module
from streamppo.learner.batch.padded import pad
from streamppo.learner.update_metrics import ModelSize, forward_flops, size_of, speed


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Any:
    with case.group(0, 1, tmp_path / "store"):
        yield


def test_a_forward_pass_multiplies_each_token_with_each_parameter_and_sees_half_of_a_square() -> None:
    size = ModelSize(multiplied=100, layers=3, hidden=4)
    # Of a row of two tokens: 2 * 100 * 2, and 2 * 3 * 4 * 4 in attention.
    assert forward_flops(size, torch.tensor([2])) == 400 + 96
    assert forward_flops(size, torch.tensor([2, 1])) == 400 + 96 + 200 + 24


def test_speed_counts_the_passes_that_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.save_model(tmp_path / "model")
    batch = pad(case.batch())
    width_B = batch.start_B + batch.length_B
    # One step has no pass before it without a value head; a second epoch and the pass before the first step add to it.
    for options, passes in ((["algorithm.advantage.kind=rloo"], 3), (["learner.epochs=2"], 7)):
        updater = case.updater(case.config_of(*options), tmp_path / "model")
        size = size_of(updater.policy)
        head = 17 * 32
        assert sum(parameter.numel() for parameter in updater.policy.lm.parameters()) - size.multiplied in (0, head)
        found = speed(size, updater.update(batch), {"score_s": 0.5, "train_s": 1.5}, 4)
        assert found == {
            "learner_tokens_per_s": int(width_B.sum()) / 2,
            "learner_tflops": pytest.approx(passes * forward_flops(size, width_B) / 2 / 4 / 1e12),
        }


def test_on_a_gpu_there_is_a_share_of_its_peak_if_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    for name, expected in (
        ("NVIDIA H100 80GB HBM3", {"mfu": 0.5, "peak_memory_mib": 3.0}),
        ("GeForce", {"peak_memory_mib": 3.0}),
    ):
        gpu = SimpleNamespace(
            max_memory_allocated=lambda: 3 * 2**20,
            reset_peak_memory_stats=lambda: resets.append(1),
            get_device_name=lambda name=name: name,
        )
        monkeypatch.setattr(module.torch, "cuda", gpu)
        assert module._gpu_speed(989 / 2) == expected
    assert len(resets) == 2
