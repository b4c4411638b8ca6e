"""The threads of a rank: chosen once by model, engines and cores, and kept by the run on machines with other cores."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MATH
from msgspec import structs

from streamppo import process
from streamppo.cli import main
from streamppo.commands import replay
from streamppo.commands.checks import check
from streamppo.config import diff
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import threads
from streamppo.driver.ray import placement
from streamppo.errors import ConfigError
from streamppo.telemetry import host

Machine = Callable[[int], None]


def configured(*overrides: str) -> Config:
    return configfile.load(MATH, overrides)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Let this machine have another number of cores, without a quota."""
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroups")
    return lambda cores: monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: set(range(cores)))


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A model of 26 million parameters: files of the right length without content."""
    return str(folder(tmp_path / "large", (1024, 1024 * 25)))


def folder(path: Path, shape: tuple[int, ...], name: str = "model.safetensors") -> Path:
    """A model's folder with one tensor of `shape`, a hole in the file."""
    path.mkdir()
    size = 4
    for length in shape:
        size *= length
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    with (path / name).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return path


CHOICES = {
    # cores, overrides: threads
    (2, ()): 2,
    (1, ()): 1,
    (8, ()): 8,
    (8, ("rollout.actors=4",)): 6,
    (8, ("rollout.actors=2", "rollout.threads=4")): 4,
    (8, ("rollout.actors=32",)): 1,
    (8, ("learner.ranks=2",)): 4,
    (8, ("learner.ranks=3", "rollout.actors=2")): 2,
    (8, ("cluster.cpus=4",)): 3,
    (8, ("cluster.cpus=1",)): 1,
    (8, ("learner.gpus=1",)): 1,
    (8, ("cluster.address=10.0.0.1:6379",)): 1,
}


@pytest.mark.parametrize(("cores", "overrides"), CHOICES)
def test_a_large_model_has_the_cores_that_engines_leave(
    machine: Machine, large: str, cores: int, overrides: tuple[str, ...]
) -> None:
    machine(cores)
    config = configured(f"model.path={large}", *overrides)
    assert config.learner.threads == "auto"
    choice = threads.choose(config)
    assert choice.number == CHOICES[cores, overrides]
    if config.cluster.cpus == 4:
        # What Ray may hand out is enough.
        assert placement.plan(threads.with_number(config, choice.number)).total("CPU") == 4


def test_a_small_model_has_one_thread_on_every_machine(machine: Machine, tmp_path: Path) -> None:
    small = folder(tmp_path / "small", (1000, 9_999))
    for cores in (1, 2, 64):
        machine(cores)
        for config in (configfile.load(MATH), configured(f"model.path={small}")):
            assert threads.choose(config).number == 1
            assert threads.with_chosen(config, tmp_path).learner.threads == 1
    assert threads.choose(configured("model.tiny.hidden_size=1024", "model.tiny.layers=12")).number > 1


def test_parameters_are_counted_in_the_files_that_transformers_reads(tmp_path: Path) -> None:
    counted = threads.count_parameters(configured(f"model.path={folder(tmp_path / 'a', (3, 5, 7))}").model)
    assert counted == 105
    other = folder(tmp_path / "b", (10,), "consolidated.safetensors")
    assert threads.count_parameters(configured(f"model.path={other}").model) is None
    (other / "pytorch_model.bin").write_bytes(bytes(4000))
    assert threads.count_parameters(configured(f"model.path={other}").model) == 1000
    (other / "model.safetensors").write_bytes(b"cut off")
    assert threads.count_parameters(configured(f"model.path={other}").model) is None
    assert threads.count_parameters(configured("model.path=nobody/has-this-model").model) is None


QUOTAS = {
    "cpu.max": {"250000 100000": 2, "max 100000": 8, "50000 100000": 1, "1600000 100000": 8},
    "cpu/cpu.cfs_quota_us": {"300000": 3, "-1": 8},
}


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in QUOTAS.items() for text in texts])
def test_the_quota_of_a_container_bounds_its_cores(machine: Machine, tmp_path: Path, file: str, text: str) -> None:
    machine(8)
    path = tmp_path / "cgroups" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (path.parent / "cpu.cfs_period_us").write_text("100000")
    assert host.cores() == QUOTAS[file][text]


def test_a_run_keeps_its_number_on_a_machine_with_other_cores(
    machine: Machine, large: str, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    config = configured(f"model.path={large}")
    run = tmp_path / "run"
    run.mkdir()
    configfile.save(config, run)
    machine(4)
    begun = threads.with_chosen(config, run)
    assert begun.learner.threads == 4
    assert "learner.threads = 4: 26,214,400 parameters, 4 cores, 1 threads of engines" in logged.text
    configfile.save(begun, run)
    machine(16)
    # By `resume`, which reads the run's file, by `run --resume`, which reads the user's, and with an override.
    asked = configfile.load(run / configfile.CONFIG, ["learner.threads=auto"])
    for given in (configfile.load(run / configfile.CONFIG), config, asked):
        assert threads.with_chosen(given, run) == begun
        assert diff.describe_changes(begun, threads.with_recorded(given, run)) == []
    assert logged.text.count("learner.threads =") == 1
    # The user's own number wins.
    assert (
        threads.with_chosen(configfile.load(run / configfile.CONFIG, ["learner.threads=3"]), run).learner.threads == 3
    )


def test_a_replay_has_the_recorded_number(machine: Machine, large: str) -> None:
    machine(16)
    recorded = threads.with_number(configured(f"model.path={large}"), 2)
    for changes in ((), ("learner.threads=auto",), ("learner.lr=0.1",)):
        assert replay.with_changes(recorded, recorded, changes).learner.threads == 2
    assert replay.with_changes(recorded, recorded, ("learner.threads=5",)).learner.threads == 5
    # Results depend on it: versions are replayed with their own.
    assert diff.learning(recorded) != diff.learning(threads.with_number(configured(f"model.path={large}"), 3))


def test_a_run_records_its_number_and_a_resume_begins_with_it(
    machine: Machine, large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    def verify(config: Config, folder: Path, **_: object) -> None:
        seen.append(config)
        configfile.save(config, folder)
        raise ConfigError("far enough")

    monkeypatch.setattr("streamppo.driver.preflight.verify", verify)
    monkeypatch.setattr("streamppo.commands.checks.check.refuse", lambda _: None)
    monkeypatch.chdir(tmp_path)
    machine(2)
    assert main(["run", str(MATH), f"model.path={large}"]) == 2
    machine(16)
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["resume", str(run)]) == 2
    assert main(["run", str(MATH), f"model.path={large}", "--resume"]) == 2
    assert [config.learner.threads for config in seen] == [2, 2, 2]


def test_check_says_the_number_and_counts_its_cores(machine: Machine, large: str) -> None:
    machine(4)
    config = configured(f"model.path={large}", "cluster.cpus=5")
    texts = [f"{one.subject}: {one.text}" for one in check.check_lightly(config)[0]]
    assert "threads: learner.threads = 4: 26,214,400 parameters, 4 cores, 1 threads of engines" in texts
    assert any("GPU 0, CPU 5" in text for text in texts)
    begun = threads.with_number(config, 4)
    # A choice of the run's own is not a mistake of the user's.
    assert not any("threads, but this machine" in one.text for one in check.check_lightly(begun)[0])
    eight = structs.replace(config, learner=structs.replace(config.learner, threads=8))
    assert any("have 9 threads, but this machine has 4 cores" in one.text for one in check.check_lightly(eight)[0])


@pytest.mark.parametrize("wrong", ["0", "many", "1.5", "-2"])
def test_a_number_of_threads_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r'threads.*of at least 1 or "auto"'):
        configfile.load(MATH, [f"learner.threads={wrong}"])
