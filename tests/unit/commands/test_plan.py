"""`streamppo plan`: predictions by hand, costs found in phases, refusals, proposals for this machine and for GPUs."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hollow_weights
import pytest
from conftest import MATH
from report_case import run_folder
from transformers import Qwen2Config

from streamppo.cli import main
from streamppo.commands.plan import measured, plan, proposals, roofline
from streamppo.commands.plan.shared_cores import SharedCores
from streamppo.commands.plan.simulation import Prediction, simulate
from streamppo.commands.plan.workload import StageCosts, Workload
from streamppo.config import file as configfile
from streamppo.config.learner import Mesh
from streamppo.config.sections import Config
from streamppo.learner import memory
from streamppo.queue.rules.state import queue_settings
from streamppo.telemetry import metrics_file
from streamppo.weights.models.settings import read_settings

FREE = StageCosts(*[0.0] * (len(StageCosts._fields) - 1))
"""Costs of nothing; the actors' pauses between calls remain."""
QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
HEADS = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}


def work(config: Config, lengths: list[int], cores: float | None = None, **changed: Any) -> Workload:
    """A workload of one engine with room for two batches, without evaluations."""
    given: dict[str, Any] = {"actors": 1, "in_flight": 16, "slots": 16, "ranks": 1} | changed
    return Workload(queue_settings(config), prompt_tokens=4.0, lengths=lengths, cores=cores, **given)


@pytest.fixture
def small(math_config: Callable[..., Config]) -> Callable[..., Config]:
    """The shipped configuration with batches of 8."""
    return lambda *overrides: math_config("queue.batch_size=8", *overrides)


# --- predictions ------------------------------------------------------------------------------------------------


def test_three_threads_on_two_cores_take_half_as_long_again() -> None:
    ends: dict[str, float] = {}
    cores = SharedCores(2.0, 0.0)

    def end(name: str) -> None:
        ends[name] = cores.now

    for name in "abc":
        cores.work(1.0, partial(end, name))
    cores.work(1.0, partial(end, "elsewhere"), on_core=False)
    for _ in range(4):
        cores.advance()
    assert ends == pytest.approx({"elsewhere": 1.0, "a": 1.5, "b": 1.5, "c": 1.5})
    with pytest.raises(RuntimeError, match="every stage waits"):
        cores.advance()


@pytest.mark.parametrize(("ahead", "lag"), [("as_needed", 1), ("max_lag", 3)])
def test_a_slow_learner_never_waits_for_data_of_the_lag_that_is_asked_for(
    small: Callable[..., Config], ahead: str, lag: int
) -> None:
    config = small("queue.max_lag=3", f"queue.ahead={ahead}")
    found = simulate(work(config, [5]), FREE._replace(update_s=1.0, step_s=0.01))
    assert found.updates_per_s == pytest.approx(1.0, rel=0.01)
    assert found.tokens_per_s == pytest.approx(40.0, rel=0.01)
    assert (found.learner_waits, found.lag_mean, max(found.lags)) == (pytest.approx(0.0, abs=0.01), lag, lag)


def test_without_lag_an_update_and_its_samples_follow_each_other(small: Callable[..., Config]) -> None:
    costs = FREE._replace(update_s=1.0, push_s=0.5, swap_s=0.25, prefill_s=0.2, step_s=0.1)
    found = simulate(work(small("queue.max_lag=0"), [11]), costs)
    # A prefill, ten steps, and two pauses of 0.05 s: until a delivery, and until the request for tickets.
    assert 1 / found.updates_per_s == pytest.approx(1.0 + 0.5 + 0.25 + 0.2 + 1.0 + 0.05, abs=0.06)
    assert found.lags == {0: found.lags.total()} and found.engines_busy == pytest.approx(0.5, abs=0.05)


def test_a_slow_engine_makes_the_learner_wait(small: Callable[..., Config]) -> None:
    costs = FREE._replace(update_s=0.1, step_s=0.1)
    found = simulate(work(small("queue.max_lag=8"), [11]), costs)
    # 16 rows of ten steps each are two batches in a second, and the pauses.
    assert found.updates_per_s == pytest.approx(2 / 1.05, rel=0.06)
    assert found.learner_waits == pytest.approx(1 - 0.1 * found.updates_per_s, abs=0.03)
    assert found.engines_busy > 0.9
    twice = simulate(work(small("queue.max_lag=8"), [11], actors=2), costs)
    assert twice.updates_per_s == pytest.approx(2 * found.updates_per_s, rel=0.06)
    bounded = simulate(work(small("queue.max_lag=2"), [11], actors=2), costs)
    assert bounded.updates_per_s < 0.8 * twice.updates_per_s, "three batches are fewer than 32 places"


def test_a_row_has_the_versions_between_whose_swaps_its_tokens_were_sampled(small: Callable[..., Config]) -> None:
    """One row of 41 tokens among short ones lives for several updates: its first tokens are the oldest."""
    config = small("queue.max_lag=8", "queue.too_old=keep", "queue.admission=mean")
    found = simulate(work(config, [3, 3, 3, 3, 3, 3, 3, 41]), FREE._replace(update_s=0.2, step_s=0.05))
    of_tokens = sum(found.lags.values())
    assert len(found.lags) > 3 and found.lag_quantile(1.0) == max(found.lags)
    assert found.lag_mean == pytest.approx(sum(lag * count for lag, count in found.lags.items()) / of_tokens)


@pytest.mark.parametrize("waits_s", [0.0, 2.0])
def test_waiting_rewards_cost_nothing_where_enough_is_in_flight(small: Callable[..., Config], waits_s: float) -> None:
    config = small("queue.max_lag=16")
    costs = FREE._replace(update_s=0.5, step_s=0.01, reward_s=waits_s)
    found = simulate(work(config, [5], in_flight=128), costs)
    assert found.updates_per_s == pytest.approx(2.0, rel=0.02)
    assert simulate(work(config, [5], in_flight=8), costs).updates_per_s < (2.1 if not waits_s else 0.6)


def test_ranks_divide_the_tokens_and_share_the_cores(small: Callable[..., Config]) -> None:
    costs = FREE._replace(token_s=0.01, step_s=1e-4, sync_s=0.03)

    def rate(ranks: int, cores: float | None) -> float:
        return simulate(work(small(), [6], cores, ranks=ranks), costs).updates_per_s

    assert rate(1, None) == pytest.approx(1 / 0.8, rel=0.01)
    assert rate(2, None) == pytest.approx(1 / 0.43, rel=0.01)
    assert rate(2, 1.2) == pytest.approx(1 / 0.86, rel=0.05), "0.2 cores are the driver's"


def test_the_same_workload_gives_the_same_prediction(small: Callable[..., Config]) -> None:
    costs = FREE._replace(update_s=0.1, step_s=0.01, row_s=0.001, sample_s=0.001, call_s=0.001)
    twice: list[Prediction] = [simulate(work(small(), [2, 9, 4], 2.0, actors=3), costs) for _ in range(2)]
    assert twice[0] == twice[1]


# --- measured costs ---------------------------------------------------------------------------------------------


def test_costs_by_the_call_and_by_the_row_are_told_apart_and_never_below_0() -> None:
    points = [((10.0, 100.0), 10 * 0.2 + 100 * 0.03), ((10.0, 400.0), 10 * 0.2 + 400 * 0.03)]
    assert measured._fit(points) == pytest.approx((0.2, 0.03))
    falling = [((10.0, 100.0), 4.0), ((10.0, 400.0), 3.0)]
    step, row = measured._fit(falling)
    assert (step, row) == (pytest.approx(0.35), 0.0)


def lines_of(seconds: int, *, update_s: float, decode: tuple[float, float]) -> list[dict[str, object]]:
    """Lines of a run with an update of 100 row tokens every second, in which its engine decodes 10 steps of 8 rows."""
    step_s, row_s = decode
    lines: list[dict[str, object]] = []
    for now in range(1, seconds + 1):
        spent = {
            "rollout-0": {
                "decode": (10 * now, 0.0, now * (10 * step_s + 80 * row_s)),
                "reward": (8 * now, 4.0 * now, 0.0),
            },
            "learner-0": {"forward": (now, 0.0, now * update_s)},
            "queue": {"store": (now, 0.0, 0.0), "archive": (now, 0.0, 0.0)},
        }
        numbers = {"learner_tokens_per_s": 100.0, "score_s": 0.5, "train_s": 0.5, "tokens": 80.0, "lag_mean": 2.0}
        fixed = {"tokens_trained": 80.0, "tokens_too_old": 0.0, "wait_s": 0.1, "update_s": 1.0, "push_ms": 1.0}
        lines.append({"update": now, "wall_s": float(now), **fixed, **numbers, "lag_histogram": {"2": 80}})
        for name, of in spent.items():
            whole = {"process": (1, float(now), sum(cpu for _, _, cpu in of.values()))}
            lines.append({"phases": name, "wall_s": float(now), "spent": of | whole})
        engine = {"version": now, "tokens": 80 * now, "busy_s": 0.0, "idle_s": 0.0, "sampled": None}
        lines.append({"engine": "rollout-0", "wall_s": float(now), **engine})
    return lines


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Callable[..., Path]:
    """A run's folder with the lines of `lines_of` and archived batches of completions of three tokens."""

    def make(name: str, seconds: int = 9, **costs: Any) -> Path:
        folder = run_folder(tmp_path / name, math_config())
        lines = lines_of(seconds, **({"update_s": 0.5, "decode": (0.01, 0.0)} | costs))
        (folder / metrics_file.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make


def test_the_costs_of_a_run_are_its_phases_over_what_they_were_for(run: Callable[..., Path]) -> None:
    costs = measured.costs([measured.read(run("a"))])
    assert costs.step_s * 10 + costs.row_s * 80 == pytest.approx(0.1)
    assert costs.update_s + costs.token_s * 100 == pytest.approx(0.5)
    assert (costs.reward_s, costs.sync_s, costs.prompt_s) == (pytest.approx(0.5), 0.0, 0.0)
    assert measured.lengths(run("b"))[1] == [3] * 32


@pytest.fixture
def resumed(run: Callable[..., Path]) -> Path:
    """A run of two parts of 20 updates: 40 s pass before the second part's processes start and count from 0."""
    folder = run("resumed", seconds=20)
    path = folder / metrics_file.METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    later = [line | {"wall_s": line["wall_s"] + 60.0} for line in lines]
    later = [line | {"update": line["update"] + 20} if "update" in line else line for line in later]
    parts = [{"part": 1, "wall_s": 0.0, "version": 0}, *lines, {"part": 2, "wall_s": 20.0, "version": 20}, *later]
    path.write_text("".join(json.dumps(line) + "\n" for line in parts))
    return folder


def test_a_resumed_run_has_the_costs_and_the_pace_of_its_parts(resumed: Path) -> None:
    read = measured.read(resumed)
    spans = {interval.end_s - interval.begin_s for intervals in read.intervals.values() for interval in intervals}
    assert spans == {1.0}, "no interval covers the pause"
    costs = measured.costs([read])
    assert costs.step_s * 10 + costs.row_s * 80 == pytest.approx(0.1)
    assert costs.update_s + costs.token_s * 100 == pytest.approx(0.5)
    realised = plan.realised(resumed)
    assert realised.updates_per_s == 1.0 and realised.tokens_per_s == pytest.approx(80.0)


def test_a_run_that_was_too_short_is_refused(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MATH), "--measured", str(run("a", seconds=1))]) == 1
    assert "too short a run to measure: after its first update, the learner wrote" in capsys.readouterr().err


def test_a_plan_for_this_machine_proposes_and_says_what_it_is_least_sure_of(
    run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "plan.json"
    words = ["queue.batch_size=16", "rollout.slots=16", "rollout.in_flight=16", "evaluation.every=0"]
    given = ["--measured", str(run("a")), "--reward-s", "0", "--json", str(to)]
    assert main(["plan", str(MATH), *words, *given]) == 0
    shown = capsys.readouterr().out
    assert "as configured" in shown and "who waits: " in shown
    assert "least sure: an update; 15% more or less of it change updates/s by -13% or +15%" in shown
    proposals = json.loads(to.read_bytes())["proposals"]
    rates = [proposal["tokens_per_s"] for proposal in proposals]
    assert proposals[0]["overrides"] == [] and rates == sorted(rates)


def test_a_run_is_compared_with_its_prediction(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    made = run("a", seconds=20)
    assert main(["plan", str(made), "--measured", str(run("b"))]) == 0
    rows = {line.split("  ")[0]: line.split()[-3:] for line in capsys.readouterr().out.splitlines()}
    assert rows["updates/s"][1] == "1" and rows["lag mean"][1] == "2"
    assert float(rows["updates/s"][2]) == pytest.approx(float(rows["updates/s"][0]), rel=0.01)


def test_a_report_has_what_was_predicted_of_each_run_beside_what_it_did(
    run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, costs, to = run("a", seconds=20), str(run("b")), tmp_path / "page.html"
    assert main(["plan", str(made), "--measured", costs]) == 0
    rates = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("updates/s")).split()[-3:]
    assert main(["report", str(made), "--to", str(to), "--measured", costs]) == 0
    page = re.sub(r"<[^>]*>|\s+", " ", to.read_text())
    assert "Predicted a, by the costs of b predicted realised ratio" in " ".join(page.split())
    assert " ".join(["updates/s", *rates]) in " ".join(page.split())
    assert main(["report", str(made), "--to", str(to)]) == 0
    assert "predicted" not in to.read_text()
    assert main(["report", str(made), "--json", "--measured", str(made)]) == 2
    assert "--measured adds to the HTML page, and --json writes none: use one of them" in capsys.readouterr().err
    assert main(["report", str(made), "--to", str(to), "--measured", str(run("short", seconds=1))]) == 1
    assert "too short a run to measure" in capsys.readouterr().err


# --- GPUs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the shapes of Qwen2.5-0.5B and weights of zeros."""
    folder = tmp_path_factory.mktemp("model")
    hollow_weights.write(folder, Qwen2Config(**QWEN, **HEADS))
    return folder


def on_gpus(model: Path, to: Path, gpus: int, *words: str) -> list[dict[str, Any]]:
    overrides = [f"model.path={model}", "rollout.slots=16", "rollout.in_flight=16", "queue.batch_size=32"]
    limits = ["rollout.max_tokens=512", "evaluation.every=0", "model.dtype=bfloat16"]
    assert main(["plan", str(MATH), *overrides, *limits, *words, "--gpus", str(gpus), "--json", str(to)]) == 0
    return json.loads(to.read_bytes())["proposals"]


def sizes(model: Path, *overrides: str) -> tuple[Config, memory.ModelSizes, Any]:
    config = configfile.load(MATH, [f"model.path={model}", "model.dtype=bfloat16", "learner.gpus=1", *overrides])
    settings = read_settings(model)
    return config, memory.sizes(settings, config.model), settings


def test_a_copy_of_the_weights_on_each_node_gathers_them_within_nodes(half_billion: Path) -> None:
    whole, model, settings = sizes(half_billion, "learner.ranks=32", "learner.micro_batch_tokens=512")
    h100 = roofline.GPUS["h100"]
    tried = proposals.choose_meshes(whole, settings, lambda _: True)
    assert tried == [Mesh(), Mesh(replicate=4)]
    copies = configfile.change(whole, [proposals.mesh_override(tried[1])])
    assert copies.learner.mesh == tried[1]
    far, near = (roofline.costs(config, model, h100, 200, 300, 0.0) for config in (whole, copies))
    # Its weights cross no network; its gradients do, before each step.
    assert near.token_s < 0.3 * far.token_s and near.update_s > far.update_s


@pytest.mark.parametrize(
    ("refused", "mesh"),
    [
        ((), Mesh()),
        (("whole",), Mesh(context=2)),
        (("whole", "context"), Mesh(tensor=2)),
        (("whole", "context", "tensor"), None),
    ],
)
def test_rows_and_layers_are_divided_where_nothing_else_fits(
    half_billion: Path, refused: tuple[str, ...], mesh: Mesh | None
) -> None:
    """The model has two heads of keys and values, so two ranks may share a row; it has no experts."""
    config, model, settings = sizes(half_billion, "learner.ranks=8")

    def fits(config: Config) -> bool:
        mesh = config.learner.mesh
        kind = "tensor" if mesh.tensor > 1 else "context" if mesh.context > 1 else "whole"
        return kind not in refused

    assert proposals.choose_meshes(config, settings, fits) == ([] if mesh is None else [mesh])
    if mesh is not None and refused:
        divided = configfile.change(config, [proposals.mesh_override(mesh)])
        costs = [roofline.costs(one, model, roofline.GPUS["h100"], 200, 300, 0.0) for one in (config, divided)]
        assert costs[1].token_s > costs[0].token_s, "what is exchanged takes time"


def test_more_rows_and_larger_batches_are_proposed_where_they_gain(run: Callable[..., Path], tmp_path: Path) -> None:
    """Steps cost the same for few rows and many, and an update costs by the update: more of both at once is better."""
    made, to = run("a", update_s=0.9, decode=(0.05, 0.0)), tmp_path / "plan.json"
    words = ["queue.batch_size=16", "rollout.slots=2", "rollout.in_flight=4", "evaluation.every=0"]
    assert main(["plan", str(MATH), *words, "--measured", str(made), "--reward-s", "0", "--json", str(to)]) == 0
    best = dict(one.split("=") for one in json.loads(to.read_bytes())["proposals"][-1]["overrides"])
    assert int(best["rollout.slots"]) > 2 and int(best["rollout.in_flight"]) >= int(best["rollout.slots"])
    assert int(best.get("queue.batch_size", 16)) in (16, 32, 64)


@pytest.mark.slow
def test_more_gpus_are_divided_between_ranks_and_engines_and_train_more_tokens(
    half_billion: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, eight = (on_gpus(half_billion, tmp_path / f"{gpus}.json", gpus)[-1] for gpus in (2, 8))
    assert eight["tokens_per_s"] > 1.8 * two["tokens_per_s"]
    settings = dict(one.split("=") for one in eight["overrides"])
    assert int(settings["learner.ranks"]) + int(settings["rollout.actors"]) <= 8
    shown = capsys.readouterr().out
    assert "494,032,768 parameters" in shown and "GPU hours" in shown and "estimated from data sheets" in shown


@pytest.mark.slow
def test_an_engine_that_only_evaluates_keeps_its_gpu(half_billion: Path, tmp_path: Path) -> None:
    for proposal in on_gpus(half_billion, tmp_path / "plan.json", 4, "evaluation.actors=1"):
        settings = dict(one.split("=") for one in proposal["overrides"])
        assert int(settings["learner.ranks"]) + int(settings["rollout.actors"]) == 3


def test_a_gpu_without_room_and_an_unknown_one_are_refused_in_a_sentence(
    half_billion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", str(MATH), f"model.path={half_billion}"]
    assert main([*given, "--gpus", "2", "--gpu", "z900"]) == 2
    assert "z900: no known GPU; known are a100, h100" in capsys.readouterr().err
    tiny = roofline.GPUS["h100"]._replace(gib=1)
    monkeypatch.setitem(roofline.GPUS, "h100", tiny)
    assert main([*given, "--gpus", "2"]) == 2
    assert "no division of 2 h100 (1 GiB) holds ranks and engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "plan needs one of --measured and --gpus"),
        (("--gpus", "8", "--measured", "runs/a"), "plan needs --measured or --gpus, not both"),
        (("--gpus", "8"), "plan --gpus needs a model of yours: model.path is builtin:tiny"),
        (("--measured", "runs/nowhere"), "runs/nowhere: no run found"),
    ],
)
def test_costs_have_one_source(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MATH), *words]) in (1, 2)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("words", ["queue.segments={}", "environment.kind=agent"])
def test_what_is_not_simulated_is_refused(
    words: str, run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["environment.agent=a:b", "reward={}"] if "agent" in words else []
    assert main(["plan", str(MATH), words, *extra, "--measured", str(run("a"))]) == 2
    assert "plan simulates whole completions of one turn" in capsys.readouterr().err


def test_drawn_lengths_have_the_mean_and_stay_below_the_limit() -> None:
    drawn = plan.lognormal(300.0, 4096)
    assert sum(drawn) / len(drawn) == pytest.approx(300.0, rel=0.05)
    assert max(drawn) <= 4096 and plan.lognormal(300.0, 256) != drawn
    assert configfile.load(MATH).rollout.max_tokens < min(100, max(drawn))
