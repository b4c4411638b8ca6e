"""Seconds and bytes of every step of a push: from the learner's float32 weights to an engine that decodes with them.

    python benchmarks/push.py --json push.json --plot push.png [--gigabytes 1.0] [--repeat 3] [--no-store]

A llama of that size in bf16. Everything happens in this process, one step after another, by the very functions that
learner, pusher and embedded engine call: CPU seconds of all threads, and wall seconds. `swap` is the part during which
the engine stands still. The first push asks the kernel for memory and is shown apart; the later ones use it again.
With `--no-store` Ray is not started, and the steps `put` and `fetch` are left out. One rank: nothing is gathered.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import plots
from benchmarks.runs import machine
from streamppo.learner import policy
from streamppo.rollout.embedded.decoder import Decoder
from streamppo.weights.buckets import Buckets, unflatten

BUCKET_BYTES = 256 * 2**20
LAYERS_OF_A_GIGABYTE = 26
DTYPE = "bfloat16"
T = TypeVar("T")


class Steps:
    """The CPU and wall seconds of each step of one push."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        self.cpu_s[name], self.wall_s[name] = time.process_time() - cpu, time.perf_counter() - wall
        return result


class Way:
    """A learner's weights, two sets of buckets, and an engine's model."""

    def __init__(self, gigabytes: float, store: bool) -> None:
        layers = max(1, round(LAYERS_OF_A_GIGABYTE * gigabytes))
        self.config = LlamaConfig(
            hidden_size=1024,
            num_hidden_layers=layers,
            intermediate_size=4096,
            vocab_size=32000,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=512,
        )
        self.learner: Any = SimpleNamespace(lm=AutoModelForCausalLM.from_config(self.config, dtype=torch.float32))
        like = policy.pushed(self.learner, DTYPE)
        self.sets = [Buckets(like, BUCKET_BYTES) for _ in range(2)]
        self.store = store
        self.decoder: Decoder | None = None

    def push(self, version: int) -> Steps:
        """Carry one version all the way."""
        step, filled = Steps(), self.sets[version % 2]
        step("cast", lambda: policy.snapshot(self.learner, filled.tensors, DTYPE))
        push = step("hash", lambda: filled.push(version, None))
        arrived = filled.arrays
        if self.store:
            refs = step("put", lambda: [ray.put(array) for array in filled.arrays])
            arrived = step("fetch", lambda: ray.get(refs))
        tensors = step("verify", lambda: unflatten(push, arrived))
        if self.decoder is None:
            self.decoder = Decoder(
                self.config, tensors, rows=1, max_tokens=8, dtype=torch.bfloat16, float32_head=True, device="cpu"
            )
        decoder = self.decoder
        parameters = step("copy", lambda: decoder.fuse(tensors))
        step("swap", lambda: setattr(decoder, "parameters", parameters))
        return step

    @property
    def gigabytes(self) -> float:
        """Bytes of a version, in units of 1e9."""
        return sum(array.nbytes for array in self.sets[0].arrays) / 1e9


def _rows(later: Sequence[Steps], first: Steps, gigabytes: float) -> dict[str, dict[str, float]]:
    names = [*first.cpu_s, "all"]
    for steps in (*later, first):
        steps.cpu_s["all"], steps.wall_s["all"] = sum(steps.cpu_s.values()), sum(steps.wall_s.values())
    return {
        name: {
            "cpu_s_per_gb": statistics.median(steps.cpu_s[name] for steps in later) / gigabytes,
            "wall_s_per_gb": statistics.median(steps.wall_s[name] for steps in later) / gigabytes,
            "first_cpu_s_per_gb": first.cpu_s[name] / gigabytes,
        }
        for name in names
    }


def _plot(rows: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw the CPU seconds of each step, those of the first push behind those of the later ones."""
    names = [name for name in rows if name != "all"]
    with plots.axes(path, 1, width=7) as (axis,):
        axis.bar(names, [rows[name]["first_cpu_s_per_gb"] for name in names], color="lightgray", label="first push")
        axis.bar(names, [rows[name]["cpu_s_per_gb"] for name in names], width=0.5, label="later ones")
        axis.set(ylabel="CPU s a GB")
        axis.legend()


def main() -> None:
    """Push some versions, print a table, and write it down with the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not options.no_store:
        memory = int(3.5e9 * max(1.0, options.gigabytes))
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=memory, log_to_driver=False)
    way = Way(options.gigabytes, not options.no_store)
    # The second push is the first one of the second set of buckets.
    first, _, *later = [way.push(version) for version in range(2 + options.repeat)]
    rows = _rows(later, first, way.gigabytes)
    print(f"{way.gigabytes:.2f} GB; seconds a GB\n{'step':8} {'CPU':>8} {'wall':>8} {'CPU, first':>12}")
    for name, row in rows.items():
        print(f"{name:8} {row['cpu_s_per_gb']:8.3f} {row['wall_s_per_gb']:8.3f} {row['first_cpu_s_per_gb']:12.3f}")
    if options.plot:
        _plot(rows, options.plot)
    if options.json:
        costs = {"push: CPU s a GB": rows["all"]["cpu_s_per_gb"]}
        content = {"machine": machine(), "costs": costs, "gigabytes": way.gigabytes, "steps": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
