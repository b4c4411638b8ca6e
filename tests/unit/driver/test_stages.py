"""Stages that die, and a changed number of rollout actors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_case import Actor, Case
from ray.exceptions import RayActorError

from streamppo.config import file as configfile
from streamppo.driver import run_folder, stages
from streamppo.driver.ray.placement import Location
from streamppo.driver.watch.watch import RunStage
from streamppo.errors import LearnerLost, RunError
from streamppo.learner.checkpoint import manifest

Make = Callable[..., Case]


def test_a_number_that_was_accepted_is_that_of_the_runs_configuration(driver_case: Make) -> None:
    run = driver_case(1)
    run.scale(3)
    assert configfile.load(run.folder / configfile.CONFIG).rollout.actors == 3
    assert run.stages.config.rollout.actors == 3
    assert not (run.folder / run_folder.ACCEPTED).exists()


def test_a_request_that_is_none_changes_nothing(driver_case: Make, logged: pytest.LogCaptureFixture) -> None:
    run = driver_case(2)
    (run.folder / run_folder.SCALE).write_text("three")
    run.tick()
    assert run.names() == ["rollout-0", "rollout-1"]
    assert "the number of rollout actors stays 2: " in logged.messages[0] and "scale.json" in logged.messages[0]
    assert not (run.folder / run_folder.ACCEPTED).exists()


FORBIDDEN = {
    "are more than one GPU": ["learner.gpus=0.5", "rollout.gpus=0.5"],
    "must be 1: one for each of rollout.engine.urls": ["rollout.engine={kind='sglang', urls=['http://localhost:1']}"],
    "needs 3 CPUs (there are 2)": ["cluster.cpus=2"],
    "needs 2 GPUs (there are 1)": ["rollout.gpus=1"],
}


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_a_number_that_no_run_may_have_is_refused_and_the_run_continues(
    driver_case: Make, logged: pytest.LogCaptureFixture, reason: str
) -> None:
    run = driver_case(1, *FORBIDDEN[reason])
    configfile.save(run.stages.config, run.folder)
    run.scale(2)
    assert run.names() == ["rollout-0"]
    assert logged.messages[0].startswith("the number of rollout actors stays 1: ") and reason in logged.messages[0]
    assert run.stages.config.rollout.actors == configfile.load(run.folder / configfile.CONFIG).rollout.actors == 1
    assert not (run.folder / run_folder.ACCEPTED).exists(), "the command waits for an answer"


@pytest.mark.parametrize("overrides", [[], ["cluster.address=auto", "cluster.cpus=2", "rollout.gpus=1"]])
def test_cpus_that_nobody_has_counted_and_clusters_that_may_grow_refuse_nobody(
    driver_case: Make, overrides: list[str]
) -> None:
    run = driver_case(1, *overrides)
    run.scale(9)
    assert len(run.names()) == 9


def test_before_the_actors_generate_nobody_is_added(driver_case: Make) -> None:
    run = driver_case(1)
    run.rollouts.generating = False
    run.scale(3)
    assert run.names() == ["rollout-0"]
    run.rollouts.generating = True
    run.tick()
    assert len(run.names()) == 3


def test_only_actors_at_work_are_asked_for_a_report(driver_case: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = driver_case(1)
    run.scale(3)
    monkeypatch.setattr(run.calls, "drain", lambda stage: None)
    monkeypatch.setattr(run.calls, "wait", lambda refs, doing: [b""])
    monkeypatch.setattr(stages, "decode", lambda data, kind: data)
    run.stages.reports()
    assert run.watched("report") == ["rollout-0.report()"]


def death(name: str) -> Any:
    return RayActorError(f"id of {name}", f"{name} has died")


def test_a_rank_that_dies_is_a_lost_learner_and_new_ranks_forget_the_checkpoint_of_the_dead(driver_case: Make) -> None:
    run = driver_case(1, "model.path=somewhere")
    for n, path in ((0, None), (1, "00000004")):
        run.ray.values[f"learner-0.{n}.locate()"] = Location("10.0.0.1", "a", [])
        run.ray.values[f"learner-0.{n}.setup(0, learner-0.{n}.rendezvous(), somewhere, {path}, past)"] = path
    run.stages.start_learner(None)
    assert run.ray.killed == [], "the first ranks are new"
    run.calls.watch_all(["learner-0.0.save()"], RunStage.CHECKPOINT)
    with pytest.raises(LearnerLost, match=r"update 3: RayActorError: learner-0\.0 has died"):
        run.stages._replace_dead("update 3", death("learner-0.0"))
    run.stages.start_learner("00000004")
    assert run.ray.killed == ["learner-0.0"]
    assert run.watched("save") == []


def test_a_rank_gets_its_number_by_its_gpu_and_not_by_the_order_of_creation(driver_case: Make) -> None:
    run = driver_case(1, "model.path=somewhere")
    run.stages.ranks = [Actor(f"learner-{gpu}.0") for gpu in "201"]
    for number in range(3):
        run.ray.values[f"learner-{number}.0.locate()"] = Location("10.0.0.1", "a", [(1, str(number))])
        run.ray.values[f"learner-{number}.0.setup({number}, learner-0.0.rendezvous(), somewhere, None, past)"] = number
    assert run.stages.start_learner(None) == 0
    assert [rank.name for rank in run.stages.ranks] == ["learner-0.0", "learner-1.0", "learner-2.0"]


def test_a_queue_that_cannot_be_rebuilt_ends_the_run(driver_case: Make) -> None:
    with pytest.raises(RunError, match=r"^queue: RayActorError: queue has died"):
        driver_case(1).stages._replace_dead("update 3", death("queue"))


def test_the_queues_second_life_is_a_restart_and_its_first_is_none(driver_case: Make) -> None:
    run = driver_case(1)
    run.stages._follow(run.stages.queue, "the queue died and was rebuilt from its journal")
    run.answer("queue.new_process_id()", "first")
    assert run.record.restarts == []
    run.answer("queue.new_process_id(first)", "second")
    assert run.record.restarts == [("queue", "the queue died and was rebuilt from its journal")]
    assert run.watched("queue.new_process_id") == ["queue.new_process_id(second)"]


def test_too_many_restarts_in_a_short_time_end_the_run(driver_case: Make) -> None:
    run = driver_case(1, "watchdog.max_restarts=2", "watchdog.restarts_s=60")
    for _ in range(6):
        run.stages.note_restart(RunStage.QUEUE, "it died")
        run.ray.now += 31
    run.stages.note_restart(RunStage.QUEUE, "it died")
    with pytest.raises(RunError, match=r"3 restarts within 60 s; the last reason: once more"):
        run.stages.note_restart(RunStage.QUEUE, "once more")
    assert len(run.record.restarts) == 7


def test_all_that_dies_with_a_node_or_a_network_is_one_restart(driver_case: Make) -> None:
    run = driver_case(1, "watchdog.max_restarts=2", "watchdog.restarts_s=600")
    run.scale(16)
    for _ in range(2):
        run.load_all()
        for name in run.names():
            run.die(name)
        run.stages.note_restart(RunStage.LEARNER, "it died too")
        run.ray.now += 60
    assert len(run.names()) == 16 and len(run.record.restarts) == 2 * 17
    with pytest.raises(RunError, match="3 restarts within 600 s"):
        run.die(run.names()[0])


def test_an_actor_that_dies_again_and_again_is_a_restart_each_time(driver_case: Make) -> None:
    run = driver_case(2, "watchdog.max_restarts=3")
    with pytest.raises(RunError, match=r"4 restarts within 600 s; the last reason: rollout-\d"):
        for _ in range(9):
            for name in run.names():
                run.die(name)
    assert len(run.record.restarts) == 2 * 3, "both of three waves, and the first of the fourth"


def test_each_actor_gets_the_server_of_its_place(driver_case: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = driver_case(2)
    urls = [f"http://localhost:{port}" for port in range(3)]
    engine = f"rollout.engine={{kind='sglang', urls={urls}}}"
    run.stages.config = run.stages._actor_config = configfile.change(run.stages.config, [engine, "evaluation.actors=1"])
    made: list[tuple[Any, int]] = []
    monkeypatch.setattr(stages, "make_rollout", lambda config, name, place, *_: made.append((config, place)))
    for place in range(3):
        run.stages._engine("rollout-7", place, {})
    assert [config.rollout.engine.at(place).urls for config, place in made] == [(url,) for url in urls]
    # Segments are shared among the configured actors, also before the others have started.
    assert {config.rollout.actors for config, _ in made} == {2}


def test_the_time_for_a_last_checkpoint_grows_with_its_size(tmp_path: Path) -> None:
    checkpoints, model = tmp_path / "checkpoints", tmp_path / "model"
    model.mkdir()
    assert manifest.seconds_to_write(checkpoints, model) == 6
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(15 * 10**9)
    assert manifest.seconds_to_write(checkpoints, model) == 6 + 900
    (checkpoints / "00000005").mkdir(parents=True)
    (checkpoints / "00000005" / manifest.MANIFEST).write_bytes(bytes(10**6))
    assert manifest.seconds_to_write(checkpoints, model) == 6.01
