"""Which GPU everybody gets, asked of Ray itself: its GPUs are numbers that it hands out, there or not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from streamppo.config.sections import Config
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
