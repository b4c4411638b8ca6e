"""The GPU of each actor, as Ray assigns it: Ray's GPUs are numbers, with or without devices."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import ray.util
from ray.cluster_utils import Cluster

from streamppo.config.sections import Config
from streamppo.driver.ray import placement
from streamppo.driver.ray.cluster import call_in_actor
from streamppo.driver.ray.placement import Placement


@pytest.fixture
def four_gpus() -> Iterator[None]:
    ray.init(address="local", num_cpus=16, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def seen(*options: dict[str, Any]) -> list[list[str]]:
    """What CUDA would see in an actor with each of `options`."""

    class Seen:
        def gpus(self) -> list[str]:
            import os

            return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    actor: Any = ray.remote(Seen)
    actors = [actor.options(**one).remote() for one in options]
    found = ray.get([one.gpus.remote() for one in actors], timeout=120)
    for one in actors:
        ray.kill(one)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_every_rank_has_a_gpu_of_its_own_and_engines_have_theirs_or_share_it(
    math_config: Callable[..., Config],
) -> None:
    apart = Placement(math_config("learner.ranks=2", "learner.gpus=1", "rollout.engine.kind=sglang", "rollout.gpus=2"))
    first, second, engine = seen(apart.rank(0), apart.rank(1), apart.actor(0))
    assert sorted([*first, *second, *engine]) == ["0", "1", "2", "3"] and len(engine) == 2
    assert seen(apart.rank(1)) == [second]
    ray.util.remove_placement_group(apart._group)

    options = ("learner.ranks=2", "learner.gpus=0.5", "rollout.gpus=0.5", "rollout.actors=2")
    shared = Placement(math_config(*options))
    first, second, third, fourth = seen(shared.rank(0), shared.rank(1), shared.actor(0), shared.actor(1))
    assert len(first) == 1 and (third, fourth) == (first, second) and first != second
    ray.util.remove_placement_group(shared._group)

    judged = Placement(math_config("learner.gpus=1", "reward={scorers={taste={kind='model', path='x', gpus=1}}}"))
    rank, model = seen(judged.rank(0), judged.model("taste"))
    assert len(model) == 1 and model != rank
    assert seen(judged.model("taste")) == [model], "it is kept for when the model starts again"


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_a_rank_has_the_same_gpu_at_each_start_although_ray_gives_the_gpus_of_a_bundle_in_any_order(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_cluster_ranks_per_node", lambda config: 4)
    bundle = Placement(math_config("learner.ranks=4", "learner.gpus=1", "learner.mesh={tensor=4}"))

    class Empty:
        """An actor whose process has nothing but its GPU."""

    actor: Any = ray.remote(Empty)
    by_start: list[list[str]] = []
    for _ in range(4):
        ranks = [actor.options(**bundle.rank(number)).remote() for number in range(4)]
        places = ray.get([call_in_actor(rank, placement.locate) for rank in ranks], timeout=120)
        by_start.append([place.gpus[0][1] for place in placement.in_order(places, places)])
        for rank in ranks:
            ray.kill(rank)
    assert by_start == [["0", "1", "2", "3"]] * 4


@pytest.mark.slow
def test_ranks_of_a_mesh_share_a_node_of_a_cluster_of_four(math_config: Callable[..., Config]) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 64, "num_gpus": 8})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=64, num_gpus=8)
        ray.init(address=cluster.address, log_to_driver=False)
        config = math_config(
            "learner.ranks=32", "learner.gpus=1", "learner.mesh={tensor=4}", f"cluster.address={cluster.address}"
        )
        placed = Placement(config)
        ray.get(placed._group.ready(), timeout=120)
        nodes = ray.util.placement_group_table(placed._group)["bundles_to_node_id"]
        places = [nodes[bundle] for bundle in placed._plan.ranks]
        assert all(len(set(places[first : first + 4])) == 1 for first in range(0, 32, 4))
        assert len(set(places)) == 4
    finally:
        ray.shutdown()
        cluster.shutdown()
