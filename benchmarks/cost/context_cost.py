"""The cost of a context with gradient and without: `queue.segments.prefix`, "attached" and "detached".

    python benchmarks/cost/context_cost.py --json out.json [--prefix 64 256 1024]

A batch has 8 segments of 64 tokens, each behind its own prefix. An update is one forward and one backward pass of a
builtin:tiny, and an optimizer step. Reported are the median CPU milliseconds of the process over alternating updates,
and the MiB that one forward pass keeps for its backward pass.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine, table
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import load_policy, optimizer, tiny
from streamppo.learner.objective import objective
from streamppo.learner.update import Updater
from streamppo.types import Batch, Identity, Trajectory

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
ROWS, TOKENS, VOCABULARY = 8, 64, 17
PREFIXES = ("attached", "detached")
MIB = 2**20


def main() -> None:
    """Measure each prefix length, print a table, and write it with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, nargs="+", default=[64, 256, 1024], help="tokens before a segment")
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        updaters = {prefix: _updater(Path(folder), prefix) for prefix in PREFIXES}
        rows = [_measure(updaters, tokens, options.updates) for tokens in options.prefix]
        dist.destroy_process_group()
    print(table(rows))
    if options.json:
        shape = {"rows": ROWS, "tokens": TOKENS, "updates": options.updates}
        options.json.write_text(json.dumps({"machine": machine(), **shape, "prefixes": rows}, indent=1) + "\n")


def _updater(folder: Path, prefix: str) -> Updater:
    from transformers import Qwen2ForCausalLM

    overrides = [f"queue.batch_size={ROWS}", f"queue.segments={{prefix = '{prefix}'}}"]
    config: Config = configfile.load(MATH, overrides)
    if not (folder / "model").exists():
        Qwen2ForCausalLM(tiny.settings(config.model, VOCABULARY)).save_pretrained(folder / "model")
    mesh = init_device_mesh("cpu", (1,))
    trained = load_policy.load(config.model, folder / "model", 1.0, mesh)
    trained.set_context(config.queue.prefix)
    adamw = optimizer.adamw(trained, config)
    return Updater(trained, adamw, objective.build(config), config, group=mesh.get_group())


def _measure(updaters: dict[str, Updater], tokens: int, updates: int) -> dict[str, Any]:
    rows = batch(tokens)
    times: dict[str, list[float]] = {prefix: [] for prefix in PREFIXES}
    for _ in range(1 + updates):
        for prefix, updater in updaters.items():
            begin = time.process_time()
            updater.update(rows)
            times[prefix].append(1e3 * (time.process_time() - begin))
    cpu_ms = {prefix: statistics.median(some[1:]) for prefix, some in times.items()}
    kept_mib = {prefix: kept(updater, rows) for prefix, updater in updaters.items()}
    return {
        "prefix": tokens,
        **{f"{name}_cpu_ms": round(number, 1) for name, number in cpu_ms.items()},
        "cpu_ratio": round(cpu_ms["detached"] / cpu_ms["attached"], 3),
        **{f"{name}_kept_mib": round(number, 1) for name, number in kept_mib.items()},
    }


def batch(tokens: int) -> PaddedBatch:
    """Segments of random tokens, each behind a prefix of `tokens` random tokens."""
    draw = np.random.default_rng(tokens)

    def trajectory(number: int) -> Trajectory:
        prompt, own = (draw.integers(2, VOCABULARY, count).astype(np.int32) for count in (tokens, TOKENS))
        return Trajectory(
            identity=Identity(task="t", prompt=number, sample=0),
            actor="rollout-0",
            prompt_tokens=prompt.tobytes(),
            tokens=own.tobytes(),
            logprobs=np.full(TOKENS, -2.8, np.float32).tobytes(),
            versions=np.zeros(TOKENS, np.int32).tobytes(),
            mask=bytes([1]) * TOKENS,
            finish="cut",
            reward=float(draw.normal()),
        )

    return pad(Batch(version=0, min_version=0, trajectories=tuple(map(trajectory, range(ROWS)))))


def kept(updater: Updater, rows: PaddedBatch) -> float:
    """MiB of the distinct tensors that a forward pass keeps, weights included."""
    seen: dict[int, int] = {}

    def see(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        scored = updater.policy(rows, "both")
    scored.logprobs_BT.sum().backward()
    updater.optimizer.zero_grad(set_to_none=True)
    return sum(seen.values()) / MIB


if __name__ == "__main__":
    main()
