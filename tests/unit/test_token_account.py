"""The account of a campaign with agents: it holds where every token has one end, and sees each token that has none."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPOSITORY, trajectory
from msgspec.structs import replace

from streamppo.config import file as configfile
from streamppo.types import Trajectory, turns
from streamppo.types.turns import TurnPlace

sys.path.insert(0, str(REPOSITORY))

from benchmarks.faults import chaos, token_account
from benchmarks.learning import agent_beside_environment as beside

LEDGER = {"delivered": 50, "consumed": 30, "failed": 5, "waiting": 8, "leased": 2, "too_old": 4, "resampled": 1}
LEDGER |= dict.fromkeys(("abandoned", "dead_letters", "duplicates"), 0)


def agents_run(name: str, sampled: int, lost: int = 0) -> Trajectory:
    """A trajectory of a prompt of one token, with an answer that arrived, and one that did not."""
    made = trajectory([5] * (sampled + lost), prompt=[4], mask=[True] * sampled + [False] * lost)
    places = [TurnPlace(1, 1 + sampled, 0, 1), *([TurnPlace(1 + sampled, 1 + sampled + lost, 0, 0)] if lost else [])]
    return replace(made, explanation=name, turns=turns.column(places))


THERE = [agents_run("run-a", 3), agents_run("run-b", 4, 2), agents_run("gone-c", 2, 6)]
NOTES = {"run-a": 3, "run-b": 4, "gone-c": 7, "run-of-a-failure": 9}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Account for a run with a ledger, two updates and notes; what is given takes the place of these."""
    monkeypatch.setattr(configfile, "load", lambda path: None)

    def account(there: list[Trajectory] = THERE, notes: dict[str, int] = NOTES, **ledger: int) -> Any:
        (tmp_path / "notes").write_text("".join(f"{name} {count}\n" for name, count in notes.items()))
        counters = SimpleNamespace(tokens=LEDGER | ledger)
        monkeypatch.setattr(token_account.report, "read_counters", lambda *_: (counters, ()))
        lines = [{"update": 1, "tokens_trained": 14, "tokens_too_old": 1}, {"remade": 2, "tokens_trained": 12}]
        lines[1]["tokens_too_old"] = 0
        monkeypatch.setattr(token_account.metrics_file, "read", lambda _: lines)
        return token_account.account(tmp_path, there, tmp_path / "notes")

    return account


def test_every_token_has_one_end(run: Any) -> None:
    found = run()
    assert found.holds, found
    assert (found.sampled, found.trained, found.too_old, found.left_out) == (58, 26, 1, 3)
    assert (found.undelivered, found.failed, found.waiting, found.dropped) == (8, 5, 10, 5)


@pytest.mark.parametrize(
    "changed",
    [
        {"delivered": 51},
        {"failed": 4},
        {"waiting": 9},
        {"notes": {**NOTES, "run-a": 2}},
        {"notes": {**NOTES, "run-b": 6}},
        {"notes": {**NOTES, "gone-c": 9}},
        {"notes": {"run-a": 3, "run-b": 4}},
        {"there": [*THERE, agents_run("run-a", 3)]},
    ],
)
def test_a_token_without_an_end_or_one_that_its_agent_saw_otherwise_is_seen(changed: Any, run: Any) -> None:
    assert not run(**changed).holds


def test_campaigns_with_agents_kill_their_processes_and_others_draw_the_kills_that_they_drew() -> None:
    options: Any = SimpleNamespace(seed=0, trials=40, kills=4, set=["updates=9"], draw=False, agents=False)
    before = chaos.jobs(options, Path())
    assert not any("agent" in job.kinds for job in before)
    with_agents = chaos.jobs(SimpleNamespace(**{**vars(options), "agents": True}), Path())  # pyright: ignore
    kinds = {kind for job in with_agents for kind in job.kinds}
    assert kinds == {*chaos.KINDS, *chaos.AGENTS} and with_agents[0].overrides[0].startswith("environment.agent=")
    old = {"kills": [], "opened": 1, "consumed": 1, "lost": 0, "twice": 0, "replayed": True, "restarts": {}}
    line = {"trial": {**old, "page_replies": 0, "page_errors": {}}, "overrides": []}
    assert chaos.result([json.loads(json.dumps(line))])["orphans"] == 0, "lines of earlier campaigns are read"


@pytest.mark.parametrize(("apart", "agree"), [(0.0, True), (0.5, False)])
def test_curves_agree_where_their_means_are_within_the_errors_of_the_seeds(apart: float, agree: bool) -> None:
    made = [
        {"arm": arm, "seed": seed, "right": [0.1 * seed + apart * (arm == "agent")] * 10}
        for arm in beside.ARMS
        for seed in (1, 2, 3)
    ]
    rows = beside.compare(made)
    assert [row["updates"] for row in rows] == ["1-5", "6-10"] and {row["agree"] for row in rows} == {agree}


def test_both_arms_are_one_configuration_but_for_the_environment(tmp_path: Path) -> None:
    agent, built_in = (configfile.load(path, []) for path in (beside.AGENT, beside.built_in(tmp_path)))
    assert replace(agent, environment=built_in.environment) == built_in
    assert agent.environment and built_in.environment
    bounds = [(one.environment.max_turns, one.environment.max_tokens) for one in (agent, built_in) if one.environment]
    assert bounds[0] == bounds[1]
