"""The resources that Ray is asked for, and the impossible ones."""

from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util

from streamppo.config.diff import learning
from streamppo.config.sections import Config
from streamppo.driver.ray.placement import Location, Placement, in_order, plan, ranks_per_node, shortage
from streamppo.errors import ConfigError, RunError

Make = Callable[..., Config]


def test_ranks_and_actors_that_share_nothing_have_bundles_of_their_own(math_config: Make) -> None:
    config = math_config("learner.ranks=2", "learner.gpus=1", "learner.threads=3", "rollout.actors=2", "rollout.gpus=1")
    made = plan(config)
    assert made.bundles == [{"CPU": 3, "GPU": 1}, {"CPU": 3, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert made.actors == [2, 3]
    assert plan(math_config()).bundles == [{"CPU": 1}, {"CPU": 1}]


def test_sharers_have_a_whole_gpu_between_them_so_that_no_two_ranks_meet_on_one(math_config: Make) -> None:
    config = math_config("learner.ranks=2", "learner.gpus=0.4", "rollout.actors=3", "rollout.gpus=0.3")
    made = plan(config)
    assert made.bundles == [{"CPU": 3, "GPU": 1}, {"CPU": 2, "GPU": 1}]
    assert made.actors == [0, 1, 0]


def test_actors_that_only_evaluate_have_places_like_the_others(math_config: Make) -> None:
    made = plan(math_config("rollout.actors=2", "rollout.gpus=1", "evaluation.actors=1", "learner.gpus=1"))
    assert (made.actors, made.evaluators, made.total("GPU")) == ([1, 2], [3], 4)
    shared = plan(math_config("learner.gpus=0.4", "rollout.gpus=0.3", "evaluation.actors=1"))
    assert (shared.actors, shared.evaluators, shared.bundles) == ([0], [0], [{"CPU": 3, "GPU": 1}])


NODES = [{"CPU": 64.0, "GPU": 8.0}] * 4
TOGETHER = {
    "nothing is exchanged": ([], NODES, 1),
    "slices": (["learner.mesh={context=2, tensor=2}"], NODES, 4),
    "slices and experts": (["learner.mesh={context=2, expert=8}"], NODES, 8),
    "copies": (["learner.mesh={replicate=4}"], NODES, 8),
    "copies of which a node has no whole one": (["learner.mesh={replicate=2, tensor=4}"], NODES, 4),
    "more than a node has": (["learner.mesh={expert=16}"], NODES, 8),
    "slices of a node and experts of two": (["learner.mesh={context=2, tensor=4, expert=16}"], NODES, 8),
    "nodes with a GPU too few": (["learner.mesh={tensor=8}"], [*NODES[1:], *[{"CPU": 64.0, "GPU": 7.0}] * 2], 4),
    "a cluster whose other nodes have not joined yet": (["learner.mesh={tensor=8}"], NODES[:1], 8),
    "copies, of which a node that has joined has no whole one": (["learner.mesh={replicate=2}"], NODES[:1], 1),
    "a cluster without a GPU so far": (["learner.mesh={tensor=8}"], [{"CPU": 64.0}], 1),
    "too few cores": (["learner.mesh={tensor=4}", "learner.threads=17"], NODES * 3, 1),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_ranks_that_exchange_tokens_or_are_a_copy_share_a_node_where_it_has_room(math_config: Make, case: str) -> None:
    changes, nodes, expected = TOGETHER[case]
    config = math_config("learner.ranks=32", "learner.gpus=1", "rollout.actors=2", *changes)
    assert ranks_per_node(config, nodes) == expected
    made = plan(config, together=expected)
    assert [made.ranks.count(bundle) for bundle in range(32 // expected)] == [expected] * (32 // expected)
    assert made.ranks == sorted(made.ranks)
    assert {made.bundles[bundle]["GPU"] for bundle in made.ranks} == {expected}
    assert [made.bundles[bundle] for bundle in made.actors] == [{"CPU": 1}] * 2
    assert made.total("GPU") == 32


def test_ranks_that_share_gpus_with_engines_have_a_bundle_each(math_config: Make) -> None:
    options = ("learner.gpus=0.5", "rollout.gpus=0.5", "rollout.actors=4", "learner.ranks=4", "learner.mesh.tensor=2")
    assert ranks_per_node(math_config(*options), NODES) == 1


def test_ranks_are_numbered_by_node_and_gpu_and_without_gpus_as_they_were_made() -> None:
    places = {
        "first": Location("10.0.0.1", "b", [(1, "3")]),
        "second": Location("10.0.0.1", "b", [(1, "9")]),
        "third": Location("10.0.0.1", "b", [(2, "10")]),
        "fourth": Location("10.0.0.2", "a", [(1, "0")]),
    }
    for names in permutations(places):
        assert in_order(names, [places[name] for name in names]) == [*places]
    assert in_order(range(3), [Location("10.0.0.1", "a", [])] * 3) == [0, 1, 2]


def test_a_replay_asks_for_the_ranks_alone(math_config: Make) -> None:
    assert plan(math_config("rollout.gpus=1"), rollout=False).bundles == [{"CPU": 1}]


def test_a_reward_model_on_a_gpu_has_a_bundle_after_all_others(math_config: Make) -> None:
    scorers = "reward={scorers={a={kind='model', path='x', gpus=0.5}, b={kind='function', function='m:f'}}}"
    config = math_config("learner.gpus=1", scorers)
    made = plan(config)
    assert made.bundles == [{"CPU": 1, "GPU": 1}, {"CPU": 1}, {"GPU": 0.5}]
    assert (made.actors, made.models) == ([1], {"a": 2})
    assert made.total("GPU") == 1.5
    assert plan(config, rollout=False).total("GPU") == 1


def test_a_shortage_says_what_is_asked_for_and_what_is_there(math_config: Make) -> None:
    made = plan(math_config("learner.gpus=1", "rollout.gpus=1"))
    assert shortage(made, {"CPU": 2.0}) == "2 GPUs (there are 0)"
    assert shortage(made, {"CPU": 1.0, "GPU": 2.0}) == "2 CPUs (there are 1)"
    assert shortage(made, {"CPU": 2.0, "GPU": 2.0}) == ""


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A Ray with 64 CPUs and no GPU, in which nothing finds a place; it records the requests."""
    asked: list[Any] = []

    def group(bundles: Any, strategy: str) -> Any:
        asked.append(bundles)
        return SimpleNamespace(id="group")

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 64.0}}])
    monkeypatch.setattr(ray.util, "placement_group", group)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda group: {"state": "PENDING"})
    return asked


def test_a_gpu_configuration_without_a_gpu_ends_at_once_in_a_ray_of_our_own(
    math_config: Make, no_gpu: list[Any]
) -> None:
    with pytest.raises(RunError, match=r"needs 2 GPUs \(there are 0\): learner.gpus, rollout.gpus"):
        Placement(math_config("learner.gpus=1", "rollout.gpus=1"))
    assert no_gpu == []


def test_in_a_cluster_that_may_grow_it_waits_and_a_stall_says_for_what(math_config: Make, no_gpu: list[Any]) -> None:
    placement = Placement(math_config("learner.gpus=1", "rollout.gpus=1", "cluster.address=auto"))
    assert no_gpu == [[{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]]
    assert "no room for the run: it needs 2 GPUs (there are 0)" in placement.waiting()


IMPOSSIBLE = {
    "a rank computes on one GPU": ["learner.gpus=2"],
    "must be 1 with the embedded engine": ["rollout.gpus=2"],
    "must be below 1 or a whole number": ["rollout.engine.kind=sglang", "rollout.gpus=1.5"],
    "have their own GPUs": ["rollout.engine={kind='sglang', urls=['http://127.0.0.1:1']}", "rollout.gpus=1"],
    "are more than one GPU": ["learner.gpus=0.6", "rollout.gpus=0.5"],
    "the 3 engines": ["learner.gpus=0.4", "rollout.gpus=0.3", "rollout.actors=3"],
    "NCCL needs a GPU for each": ["learner.gpus=0.5", "learner.ranks=2"],
    "needs a GPU, and learner.gpus is 0": ["model.attention=flash_attention_2", "model.dtype=bfloat16"],
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_gpus_that_cannot_be_had_are_refused(math_config: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        math_config(*IMPOSSIBLE[message])


def test_how_much_of_a_gpu_a_rank_has_changes_no_update(math_config: Make) -> None:
    shared = math_config("learner.ranks=2", "learner.gpus=0.5", "rollout.gpus=0.5", "rollout.actors=2")
    whole = math_config("learner.ranks=2", "learner.gpus=1", "rollout.gpus=1", "rollout.actors=2")
    assert learning(shared) == learning(whole) != learning(math_config("learner.ranks=2"))
