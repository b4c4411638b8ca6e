"""Plays a draw with the commands `streamppo check` and `streamppo run`, in processes; compares as folder_play.py."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import folder_oracle as oracle
import folder_play as play
import numpy as np
from folder_draw import Draw

from streamppo.queue.store import archive
from streamppo.types import flags, floats, ints

TIMEOUT_S = 240


def run(made: Draw, folder: Path) -> play.Outcome:
    """Play a draw in `folder` with the commands; its engine must be the embedded one."""
    begin = time.perf_counter()
    found = play.Outcome(made.number, str(made), made.expected)
    path, _ = play.write(made, folder)
    code, said = _command("check", str(path))
    if code:
        lines = [line for line in said.splitlines() if " error " in line or line.startswith((" ", str(path)))]
        found.outcome, found.sentence = "refused", " ".join(" ".join(lines).split()) or said[-300:]
    else:
        code, said = _command("run", str(path), "--runs", str(folder / "runs"))
        if code:
            last = " ".join(said.splitlines()[-6:])
            found.wrong.append(f"check found nothing, and the run ended with {code}: {last[-400:]}")
        else:
            _compare(made, folder, found)
    play.judge(made, found)
    found.seconds = round(time.perf_counter() - begin, 2)
    return found


def _command(*words: str) -> tuple[int, str]:
    environment = {**os.environ, "COLUMNS": "2000", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "streamppo", *words]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def _compare(made: Draw, folder: Path, found: play.Outcome) -> None:
    """Compare the run's files with transformers' results on the initial model and on the export."""
    model, runs = folder / "model", folder / "runs" / f"draw-{made.number}"
    first, last = oracle.load(model), oracle.load(runs / "final")
    words, close = len(first.tokenizer), play.CLOSE[made.compute]
    if last.missing:
        found.wrong.append(f"export: transformers reports {last.missing[:3]}")
    failed = json.loads((runs / "summary.json").read_text()).get("failed", {})
    if failed:
        found.wrong.append(f"trajectories failed: {failed}")
    written = archive.open(runs)
    if len(written.versions()) != play.UPDATES:
        found.wrong.append(f"batches of {written.versions()}")
    far = 0.0
    for one in written.batch(0).trajectories:
        prompt, tokens = ints(one.prompt_tokens).tolist(), ints(one.tokens).tolist()
        theirs, mask = oracle.logprobs(first, prompt, tokens, words=words), flags(one.mask)
        far = max(far, oracle.furthest(floats(one.logprobs)[mask], theirs[mask]))
        # A masked token is an observation, and so there is a second turn.
        found.two_turns += not mask.all()
    if not far <= close:
        found.wrong.append(f"version 0: log-probs are {far:.2g} from transformers'")
    rewards = defaultdict[int, set[float]](set)
    for one in (one for version in written.versions() for one in written.batch(version).trajectories):
        rewards[one.identity.prompt].add(one.reward)
    teaches = any(len(some) > 1 for some in rewards.values())
    moved = [not np.array_equal(a, b) for a, b in zip(_weights(first), _weights(last), strict=True)]
    if teaches and not any(moved):
        found.wrong.append("export: the weights are those of the start")


def _weights(loaded: oracle.Loaded) -> list[np.ndarray]:
    return [one.numpy() for one in loaded.lm.state_dict().values()]
