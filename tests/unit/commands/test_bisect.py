"""`bisect` finds the same version as an examination of all versions, and makes only the necessary updates again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_case
import thread_run

from streamppo import cli
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.telemetry import metrics_file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six updates, with checkpoints of 2, 4 and 6."""
    return thread_run.trained(tmp_path_factory.mktemp("bisected"))


def numbers(run: Path, metric: str) -> dict[int, float]:
    return {int(line["update"]): float(dict(line)[metric]) for line in metrics_file.read(run) if "update" in line}  # pyright: ignore[reportArgumentType]


def found(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """The answer of a question for which nothing is replayed."""
    assert cli.main(["bisect", str(run), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def remade(run: Path, *options: str) -> Any:
    done = replay_case.command("streamppo", "bisect", str(run), "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written(folder: Path, text: str) -> str:
    path = folder / "asked.py"
    path.write_text(text)
    return str(path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", ["entropy", "grad_norm", "reward", "policy_loss"])
def test_a_bound_of_a_metric_is_found_where_a_look_at_every_line_finds_it(
    run: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = numbers(run, metric)
    for bound in sorted(values.values())[::2]:
        for option, holds in (("--above", float.__gt__), ("--below", float.__lt__)):
            told = found(run, capsys, "--metric", metric, f"{option}={bound!r}")
            holding = [version for version, value in values.items() if holds(value, bound)]
            assert told["version"] == min(holding, default=None) and told["holding"] == len(holding)
            assert told["value"] == (values[holding[0]] if holding else None)
            assert (told["remade"], told["looked"], told["certain"]) == (0, 6, bool(holding))
            behind = [holds(values[version], bound) for version in values if holding and version > holding[0]]
            assert told["monotone"] == (all(behind) if behind else None)
            assert ("does not hold throughout" in told["sure"]) == (told["monotone"] is False)


def test_a_test_of_batches_and_metrics_looks_at_all_of_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
def test(version, metrics, batch):
    assert metrics["update"] == version and batch.version == version - 1
    return batch.trajectories[0].identity.prompt >= 12
"""
    told = found(run, capsys, "--test", written(tmp_path, text))
    assert (told["version"], told["remade"], told["certain"], told["monotone"]) == (4, 0, True, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "version", "made", "monotone"),
    [("version >= 3", 3, 1, True), ("version in (4, 5)", 4, 1, False)],
)
def test_a_test_of_weights_makes_the_versions_between_two_checkpoints_alone(
    run: Path, tmp_path: Path, condition: str, version: int, made: int, monotone: bool
) -> None:
    text = f"""
from safetensors.torch import load_file

def test(version, model):
    assert load_file(model / "model.safetensors")
    return {condition}
"""
    told = remade(run, "--test", written(tmp_path, text))
    assert (told["version"], told["remade"], told["monotone"]) == (version, made, monotone)
    assert told["looked"] == 3 + made and not told["certain"], "version 1 was not looked at"
    assert "it is the first after version 2; it may hold at earlier, unexamined versions" in told["sure"]


@pytest.mark.slow
def test_a_change_is_made_to_every_version_up_to_the_first_that_holds(run: Path) -> None:
    change = ("--set", "learner.lr=5e-3")
    assert replay_case.replay(run, *change).returncode == 0
    newest = max((run / "replays").glob("*.json"), key=lambda path: int(path.stem))
    values = {row["version"]: row["replayed"]["entropy"] for row in json.loads(newest.read_text())["updates"]}
    bound = sorted(values.values())[3]
    first = next(version for version, value in values.items() if value < bound)
    told = remade(run, "--metric", "entropy", f"--below={bound!r}", *change)
    assert (told["version"], told["value"], told["remade"]) == (first, values[first], first)
    assert told["certain"] and told["looked"] == first


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "needs --metric NAME with a bound, or --test FILE.py"),
        (("--metric", "entropy"), "needs one of --above and --below"),
        (("--metric", "entropy", "--above", "1", "--below", "2"), "needs one of --above and --below"),
        (("--metric", "entropi", "--above", "1"), "no update has a metric 'entropi'; is 'entropy' meant?"),
        (("--metric", "entropy", "--above", "nan"), "nan is not finite"),
        (("--test", "nowhere.py"), "nowhere.py"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(
    run: Path, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bisect", str(run), *options])
    said = capsys.readouterr()
    assert reason in said.err and not said.out and "Traceback" not in said.err


@pytest.mark.parametrize(
    ("metric", "reason"), [("accuracy", "no evaluation has a score yet"), ("reward", "no update was made yet")]
)
def test_a_run_that_has_just_begun_has_no_answer(
    metric: str, reason: str, tmp_path: Path, math_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    configfile.save(math_config(), tmp_path)
    assert cli.main(["bisect", str(tmp_path), "--metric", metric, "--above", "0"]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def test(weights): return True",
            "`test` asks for 'weights'; its parameters may be version, metrics",
        ),
        ("def test(version): return 3", "`test` must return True or False, and returned 3"),
        ("def test(version): return 1 / 0", "asked.py:1: ZeroDivisionError"),
        ("def other(): pass", "has no 'test'"),
    ],
)
def test_a_test_that_is_none_is_told_by_its_line(
    run: Path, tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bisect", str(run), "--test", written(tmp_path, text)])
    assert reason in capsys.readouterr().err
