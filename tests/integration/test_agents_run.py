"""A whole run whose agent has two sub-agents and the real OpenAI client: rows with branches, trained and replayed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, SUPPORT
from replay_case import replay

from streamppo.queue.store import archive
from streamppo.types import branches, ints

SHORT = ("updates=3", "queue.batch_size=16", "model.tiny.max_steps=20", "evaluation.prompts=16")


def streamppo(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "streamppo", *words],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_sub_agents_are_branches_of_one_trajectory_trained_once_and_replayed(tmp_path: Path) -> None:
    agent = f"environment.agent={SUPPORT / 'sub_agents.py'}:run"
    bounds = ("environment.max_tokens=64", "rollout.max_tokens=6", "environment.max_turns=3")
    streamppo("run", "examples/calculator_agent.toml", "--runs", str(tmp_path), agent, *bounds, *SHORT)
    run = tmp_path / "calculator_agent"
    kept = archive.open(run)
    rows = [row for version in range(3) for row in kept.batch(version).trajectories]
    assert len(rows) == 48
    for row in rows:
        pairs = branches.pairs(row.branches)
        whole = np.concatenate([ints(row.prompt_tokens), ints(row.tokens)])
        # The other sub-agent begins anew, and the agent's last turn follows its first answer.
        assert len(pairs) in (1, 2) and -1 in pairs[:, 1] and len(whole) <= 64 + 9
    summary = json.loads((run / "summary.json").read_text())
    counted = summary["engines"]["agents"]
    # Runs under way at the end have made requests, too.
    assert counted["requests"] >= 3 * counted["runs"] > 0 and not counted.get("undelivered tokens")
    ledger = summary["tokens"]
    assert ledger["delivered"] == sum(count for name, count in ledger.items() if name != "delivered")
    done = replay(run)
    assert "bit for bit" in done.stdout, done.stderr
    # One update alone: rows with branches, from the first model.
    streamppo("bundle", str(run), "--update", "1", "--to", str(tmp_path / "1.safetensors"))
    assert "version 1 replayed bit for bit" in streamppo("replay", str(tmp_path / "1.safetensors"))
