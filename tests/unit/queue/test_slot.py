"""The states of a slot: every arrow of the drawing can be gone, and no other one."""

import itertools

import pytest
from conftest import trajectory

from streamppo.queue.rules.slot import Slot, SlotState, Unit
from streamppo.types import Identity

DRAWN = {
    ("open", "issued"),
    ("open", "abandoned"),
    ("issued", "ready"),
    ("issued", "open"),
    ("issued", "abandoned"),
    ("ready", "leased"),
    ("ready", "open"),
    ("ready", "abandoned"),
    ("leased", "consumed"),
}


def slot(state: SlotState) -> Slot:
    return Slot(7, Identity(task="t", prompt=7, sample=0), Unit(), state=state)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SlotState, SlotState)))
def test_a_slot_moves_along_the_arrows_and_nowhere_else(source: SlotState, target: SlotState) -> None:
    moved = slot(source)
    if (source, target) in DRAWN:
        moved.move(target)
        assert moved.state is target
    else:
        with pytest.raises(AssertionError, match=f"slot 7 was {source} and cannot become {target}"):
            moved.move(target)
        assert moved.state is source


def test_a_slot_that_is_sampled_again_has_another_identity_and_forgets_what_it_had() -> None:
    again = slot(SlotState.OPEN)
    again.issue("a", 3)
    again.store(trajectory([5]))
    assert (again.state, again.actor, again.trajectory) == (SlotState.READY, None, trajectory([5]))
    again.reopen()
    assert (again.state, again.actor, again.trajectory, again.identity.attempt) == (SlotState.OPEN, None, None, 1)


@pytest.mark.parametrize("state", [SlotState.OPEN, SlotState.READY, SlotState.LEASED])
def test_a_trajectory_is_stored_for_an_issued_slot_alone(state: SlotState) -> None:
    with pytest.raises(AssertionError):
        slot(state).store(trajectory([5]))
