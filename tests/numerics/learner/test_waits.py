"""No pass of an update asks the device for a number: the host never waits for a GPU between micro-batches.

On a CPU, where there is nothing to wait for, the operations that would wait are refused.
"""

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from streamppo.learner import update
from streamppo.learner.batch.padded import Host, pad
from streamppo.learner.model.policy import Policy
from streamppo.learner.objective.loss import Loss

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
CONFIGS: dict[str, tuple[str, ...]] = {
    "one step": (),
    "minibatches": ("learner.minibatches=2", "learner.epochs=2"),
    "a critic of its own": ("algorithm.critic.model=policy", "algorithm.proximal=recompute"),
    "groups and a reference": (
        "algorithm.advantage.kind=grpo",
        "algorithm.kl.loss_beta=0.1",
        "algorithm.entropy=0.01",
        "algorithm.aggregation=prompt-mean",
    ),
    "rows end to end": ("model.attention=eager",),
    "prompts that are not shared": ("model.share_prompts=false", "algorithm.aggregation=sequence-mean-token-mean"),
    "a context without gradient": ("queue.segments={prefix='detached'}",),
    "filters and rules": (
        "algorithm.filters=[{kind='truncated'}, {kind='off_policy_negative', delta=0.5}]",
        "algorithm.correction={kind='reject', reject=[{kind='token', band=[0.2, 2.0]}, {kind='k3', at_most=0.7}]}",
    ),
    "candidates and a temperature": ("rollout.top_p=0.9", "rollout.temperature=0.7"),
}


class Refuses(TorchDispatchMode):
    """Notes the operations of `WAITS`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS:
            # The newest line that is not torch's.
            calls = (one for one in reversed(traceback.extract_stack()) if one.filename != __file__)
            frame = next(one for one in calls if "/torch/" not in one.filename)
            self.found.append(f"{name} at {frame.filename}:{frame.lineno}")
        return func(*args, **(kwargs or {}))


def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose tensors are the host's: it may ask for their numbers."""

    def called(*arguments: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments)

    return called


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuses]:
    """Watches passes, losses and backward passes; not what is computed of the host's own columns."""
    mode = Refuses()

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            with mode:
                return function(*arguments, **named)

        return called

    monkeypatch.setattr(update, "score", within(update.score))
    monkeypatch.setattr(Loss, "share", within(Loss.share))
    monkeypatch.setattr(update.Updater, "backward", within(update.Updater.backward))
    monkeypatch.setattr(Host, "select", on_the_host(Host.select))
    monkeypatch.setattr(Policy, "_lay_out", on_the_host(Policy._lay_out))
    yield mode


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group for all tests of this file."""
    with case.group(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield


def test_the_hosts_columns_are_no_part_of_what_fsdp_moves_to_a_gpu() -> None:
    batch = pad(case.batch())
    moved = batch.to(torch.device("meta"))
    assert moved.on_host.inputs_BL.equal(batch.inputs_BL) and moved.on_host.inputs_BL.device.type == "cpu"
    assert all(not isinstance(one, torch.Tensor) or one.is_meta for one in tree_leaves(moved))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", CONFIGS)
def test_no_pass_asks_the_device_for_a_number(name: str, folder: Path, watched: Refuses) -> None:
    overrides = CONFIGS[name]
    batch = case.cut(case.batch()) if "candidates" in name else case.batch()
    updater = case.updater(case.config_of("learner.micro_batch_tokens=30", *overrides), folder)
    updater.update(pad(batch))
    assert not watched.found
