"""A whole run of agents on the real SGLang: contexts reused, every token accounted for, replayed without the agent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import REPOSITORY
from replay_case import replay

from benchmarks.faults import token_account
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file as lines
from streamppo.types import Trajectory, branches, ints, turns
from streamppo.types.turns import TurnPlace

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
AGENT = '''
"""Talks for three turns, goes back to the first, and hangs up on one request in four runs."""

import os
import random
from contextlib import suppress
from secrets import token_hex

import httpx
from openai import APITimeoutError, AsyncOpenAI
from streamppo.tasks.environments import Done

CLIENTS = []
QUESTION, HANGS_UP = "1+2=3+4=" * 3, httpx.Timeout(60, read=0.001)


async def run(prompt: str, base_url: str, api_key: str, answer: str) -> Done:
    if not CLIENTS:
        CLIENTS.append(AsyncOpenAI(base_url=base_url, api_key="replaced", max_retries=0))
    client, received, hangs_up = CLIENTS[0].with_options(api_key=api_key), [], random.random() < 0.25

    async def ask(*texts: str, **options) -> str:
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        made = await client.chat.completions.create(model="policy", messages=messages, **options)
        received.append(made.usage.completion_tokens)
        return made.choices[0].message.content or ""

    if hangs_up:
        with suppress(APITimeoutError):
            await ask(f"1+{prompt}", timeout=HANGS_UP)
    said = [f"{prompt}1+2=" * 6]
    for _ in range(3):
        said += [await ask(*said), QUESTION]
    await ask(*said[:2], "5+6=")
    name = f"run-{token_hex(8)}"
    with open(os.environ["STREAMPPO_WITNESS"], "a") as notes:
        notes.write(f"{name} {sum(received)}\\n")
    return Done(sum(received) / 24, {}, name)
'''
TURNS, UPDATES = 4, 12
SHORT = (
    *(f"updates={UPDATES}", "queue.batch_size=24", "rollout.slots=12", "rollout.in_flight=12"),
    *("environment.max_tokens=220", "environment.max_turns=6", "model.tiny.max_steps=20"),
    "evaluation={every=0, prompts=4}",
)


class AgentsRun(NamedTuple):
    """A run that has ended: its folder, its agents' notes, what each version was trained on and what waited for it."""

    folder: Path
    witness: Path
    batches: dict[int, tuple[Trajectory, ...]]
    waiting: list[Trajectory]

    @property
    def trained(self) -> list[Trajectory]:
        """What was trained on."""
        return [row for batch in self.batches.values() for row in batch]

    def engines(self) -> dict[str, Any]:
        """What summary.json has of its engines."""
        return json.loads((self.folder / "summary.json").read_text())["engines"]


def trained(folder: Path, kv: str) -> AgentsRun:
    """Train with agents on SGLang, whose caches a swap keeps or computes again."""
    agent, witness = folder / "agent.py", folder / "witness"
    agent.write_text(AGENT)
    engine = f"rollout.engine={{kind='sglang', kv='{kv}', mem_fraction_static=0.1}}"
    command = [sys.executable, "-W", "ignore", "-m", "streamppo", "run", "examples/calculator_agent.toml"]
    subprocess.run(
        [*command, "--runs", str(folder / "runs"), f"environment.agent={agent}:run", engine, *SHORT],
        env={**os.environ, "STREAMPPO_WITNESS": str(witness)},
        cwd=REPOSITORY,
        check=True,
    )
    (run,) = (folder / "runs").iterdir()
    journal, found = Journal.open_run(run), archive.open(run)
    saved = journal.read()
    journal.close()
    assert saved is not None
    batches = {version: tuple(found.batch(version).trajectories) for version in found.versions()}
    return AgentsRun(run, witness, batches, [slot.stored for slot in saved.slots if slot.stored is not None])


def continued(row: Trajectory) -> list[tuple[int, TurnPlace]]:
    """Each turn that goes on from an earlier one, and the number of tokens of that one's context and answer."""
    prompt, found = len(ints(row.prompt_tokens)), []
    width = prompt + row.num_tokens
    depths, before = branches.depths(row.branches, width), dict(branches.pairs(row.branches).tolist())
    ends = {turn.end - 1 for turn in turns.read(row.turns)}
    for turn in turns.read(row.turns):
        at = turn.start - 1
        while at >= 0 and at not in ends:
            at = before.get(at, at - 1)
        if at >= 0:
            found.append((int(depths[at]) + 1, turn))
    return found


def versions(row: Trajectory) -> list[list[int]]:
    """The versions of each turn's tokens."""
    prompt = len(ints(row.prompt_tokens))
    return [ints(row.versions)[turn.start - prompt : turn.end - prompt].tolist() for turn in turns.read(row.turns)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_run_of_agents_reuses_contexts_accounts_for_its_tokens_and_is_replayed(tmp_path: Path, kv: str) -> None:
    run = trained(tmp_path, kv)
    updates, engines = lines.updates(run.folder), run.engines()
    rewards = [line["reward"] for line in updates]
    assert len(updates) == UPDATES and np.isfinite(rewards).all() and rewards[-1] > rewards[0] + 0.2
    assert {len(turns.read(row.turns)) for row in run.trained} == {TURNS, TURNS + 1}, "some runs hung up"
    account = token_account.account(run.folder, [*run.trained, *run.waiting], run.witness)
    assert account.holds and account.trained > 0 and account.undelivered > 0, account
    assert engines["swaps"] == UPDATES and engines["restarts"] == 0
    sampled = {version: [versions(row) for row in batch] for version, batch in run.batches.items()}
    assert [*sampled] == [*range(UPDATES)]
    for version, rows in sampled.items():
        told = [turn for row in rows for turn in row]
        assert all(turn == sorted(turn) and 0 <= turn[0] <= turn[-1] <= version for turn in told)
    assert max(turn[-1] for row in sampled[UPDATES - 1] for turn in row) >= UPDATES - 3, "max_lag is 2"
    assert any(row[0][0] < row[-1][-1] for rows in sampled.values() for row in rows), "weights changed inside of runs"
    # All of a context is reused, but for turns that a swap came before, and each version has its cache.
    known = [(count, min(count, turn.reused)) for row in run.trained for count, turn in continued(row)]
    assert len(known) == (TURNS - 1) * len(run.trained)
    assert sum(reused for _, reused in known) > 0.5 * sum(count for count, _ in known)
    assert engines["prefix_reused"] > 0.3 and engines["context_reused"] > 0.5
    assert engines["kv_age"] == 0 and [*engines["kv_ages"]] == ["0"]
    # Tokens behind a swap have the log-probs of the newer weights on the older cache, unless that is computed again.
    exact = updates[:1] if kv == "keep" else updates
    assert max(line["mismatch"] for line in exact) < 1e-4
    (tmp_path / "agent.py").unlink()
    done = replay(run.folder)
    assert "bit for bit" in done.stdout, done.stderr
