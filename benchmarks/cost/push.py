"""Seconds and bytes of every step of a push: from the learner's float32 weights to an engine that decodes with them.

    python benchmarks/cost/push.py --json push.json --plot push.png [--gigabytes 1.0] [--lr 1e-6 1e-4] [--no-store]
    python benchmarks/cost/push.py --layouts 10M 100M 500M 7B/64 --json layouts.json --plot layouts.png

The model is a llama of `--gigabytes` in bf16. Between two pushes AdamW changes its float32 weights at one of the
learning rates, with random gradients; `whole` is a push without deltas. All steps run in this process, one after
another, by the functions that rank, pusher, follower and embedded engine call. Measured are CPU seconds of all threads,
and wall seconds.

    snapshot    float32 shards into buckets in bf16          put, fetch   the object store
    describe    the hash of every shard; deltas              unpack       the replica: nothing, or deltas applied
    copy        into the engine's spare memory; its hash     swap         the part in which the engine stands still

The first pushes allocate memory, and the very first one is reported separately; the measured ones reuse the memory.
`memcpy` copies the same bytes between warm memory, `torch.save` writes them to a folder. With `--no-store` Ray is not
started. One rank.

`--layouts` measures models of these sizes one after another; `7B/64` is the share of one of 64 ranks of a model like
Qwen2.5-7B, without an engine. It also reports the memory of two sets of buckets relative to the rank's share, and the
learner's stall for a push relative to one training step on 1,024 tokens. A real step has far more tokens, so that this
ratio is an upper bound.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import ray
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import plots
from benchmarks.lib.runs import Goal, machine, told
from streamppo.learner.model import policy
from streamppo.learner.model.snapshot import snapshot
from streamppo.rollout.embedded.fused_decoder import FusedDecoder
from streamppo.weights.buckets import Buckets
from streamppo.weights.replica import Replica

BUCKET_BYTES = 256 * 2**20
LAYERS_OF_A_GIGABYTE = 26
DTYPE = "bfloat16"
WHOLE = "whole"
PAUSED = "swap"
GOALS = (
    ("whole", "all", Goal("a whole push: CPU seconds a GB (12 for 15 GB)", most=0.8)),
    ("whole", PAUSED, Goal("a whole push: seconds a GB in which the engine stands still", most=0.1)),
    ("lr 1e-06", "all", Goal("at lr 1e-6: CPU seconds a GB (12 for 15 GB)", most=0.8)),
    ("lr 1e-06", "sent", Goal("at lr 1e-6: bytes sent over all bytes", most=0.05)),
)
"""(variant, step, goal), set before any measurement."""
LLAMAS: dict[str, dict[str, int]] = {
    "10M": {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768, "vocab_size": 8000},
    "100M": {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 2048, "vocab_size": 32000},
    "500M": {"hidden_size": 1024, "num_hidden_layers": 26, "intermediate_size": 4096, "vocab_size": 32000},
}
"""Settings of the models of `--layouts`, by their rounded number of parameters."""
SHARE_OF_7B, RANKS_OF_7B = "7B/64", 64
TOKENS = 1024
WARM = 6
"""Pushes after the first one that still allocate memory."""
T = TypeVar("T")


class Steps:
    """The CPU and wall seconds of each step of one push, and the shares of bytes that were `sent` and `changed`."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self.sent = self.changed = 1.0

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        self.cpu_s[name], self.wall_s[name] = time.process_time() - cpu, time.perf_counter() - wall
        return result


class Way:
    """A learner's weights, two sets of buckets, a replica, and an engine's model."""

    def __init__(self, config: Any, lm: Any, *, store: bool, serves: bool = True) -> None:
        self.config, self.serves = config, serves
        self.learner: Any = SimpleNamespace(lm=lm)
        shards = policy.shards(self.learner, DTYPE)
        before = _resident()
        self.sets = [Buckets(shards, BUCKET_BYTES) for _ in range(2)]
        self.bytes = sum(array.nbytes for array in self.sets[0].arrays)
        for filled in self.sets:
            snapshot(self.learner, filled.tensors)
        self.memory = (_resident() - before) / self.bytes
        self.replica, self.store = Replica(), store
        self.decoder: FusedDecoder | None = None
        self.version = 0

    @classmethod
    def of(cls, *, store: bool, **settings: Any) -> "Way":
        """A `Way` with a llama of these settings and random weights."""
        heads = settings["hidden_size"] // 64
        config = LlamaConfig(
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=TOKENS, **settings
        )
        return cls(config, AutoModelForCausalLM.from_config(config, dtype=torch.float32), store=store)

    @classmethod
    def of_7b(cls, *, store: bool) -> "Way":
        """A `Way` with one of 64 ranks' rows of a 7B model; the whole model is never allocated."""
        config = Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        )
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        lm = torch.nn.Module()
        for name, tensor in whole.named_parameters():
            rows = -(-len(tensor) // RANKS_OF_7B)
            shard = torch.empty(rows, *tensor.shape[1:]).normal_(std=0.02)
            lm.register_parameter(name.replace(".", "-"), torch.nn.Parameter(shard))
        return cls(config, lm, store=store, serves=False)

    def stands_still(self) -> float:
        """CPU seconds of a snapshot relative to those of a training step on `TOKENS` tokens, with AdamW."""
        lm = self.learner.lm
        adamw = torch.optim.AdamW(lm.parameters(), lr=1e-6, foreach=False, fused=True)
        tokens = torch.randint(0, self.config.vocab_size, (1, TOKENS))
        times: list[tuple[float, float]] = []
        for _ in range(2):
            begin = time.process_time()
            lm(input_ids=tokens, labels=tokens).loss.backward()
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            trained = time.process_time()
            snapshot(self.learner, self.sets[0].tensors)
            times.append((time.process_time() - trained, trained - begin))
        return times[-1][0] / times[-1][1]

    def train(self, lr: float, steps: int) -> None:
        """Change the weights by `steps` AdamW steps with random gradients."""
        parameters = list(self.learner.lm.parameters())
        adamw = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), foreach=False, fused=True)
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            adamw.step()
        adamw.zero_grad(set_to_none=True)

    def push(self, *, delta: bool) -> Steps:
        """Push one version through all steps, and time each of them."""
        step, (filled, before) = Steps(), (self.sets[self.version % 2], self.sets[1 - self.version % 2])
        step("snapshot", lambda: snapshot(self.learner, filled.tensors))
        if delta:
            pairs = zip(filled.arrays, before.arrays, strict=True)
            different = sum(np.count_nonzero(one.view("<u2") != other.view("<u2")) for one, other in pairs)
            step.changed = different * 2 / self.bytes
        push, arrays = step("describe", lambda: filled.push(self.version, before if delta else None))
        step.sent = sum(array.nbytes for array in arrays) / self.bytes
        arrived: Sequence[Any] = arrays
        if self.store:
            refs = step("put", lambda: [ray.put(array) for array in arrays])
            arrived = step("fetch", lambda: ray.get(refs))
        else:
            arrived = [array.copy() for array in arrays]
        step("unpack", lambda: self.replica.take(push, arrived))
        tensors, contents = self.replica.tensors, self.replica.contents
        self.version += 1
        if not self.serves:
            return step
        if self.decoder is None:
            self.decoder = FusedDecoder(
                self.config, tensors, rows=1, dtype=torch.bfloat16, float32_head=True, device="cpu"
            )
        decoder = self.decoder
        step("copy", lambda: decoder.stage(tensors, contents))
        step(PAUSED, decoder.adopt)
        return step


def _resident() -> int:
    """The resident memory of this process in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def ways(way: Way, options: argparse.Namespace) -> Iterator[tuple[str, list[Steps], Steps | None]]:
    """(name, measured pushes, first push of all or None) of each variant."""
    # The second push is the first one to use the second set of buckets and the engine's spare memory; the object store
    # reuses memory only after some versions.
    first, *later = [way.push(delta=False) for _ in range(1 + WARM + options.repeat)]
    yield WHOLE, later[WARM:], first
    for lr in options.lr:
        found: list[Steps] = []
        way.push(delta=False)
        for _ in range(options.repeat):
            way.train(lr, steps=1 if found else 3)
            found.append(way.push(delta=True))
        # At the first delta the replica copies its tensors, which were views of buckets until then.
        yield f"lr {lr:g}", found[1:] or found, None


def beside(nbytes: int) -> dict[str, float]:
    """CPU seconds per GB of memcpy and torch.save with the same number of bytes."""
    # Not zeros: the kernel would allocate their pages only at the first write.
    source, target = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
    step = Steps()
    step("memcpy", lambda: np.copyto(target, source))
    with tempfile.TemporaryDirectory() as folder:
        step("torch.save", lambda: torch.save({"w": torch.from_numpy(source)}, Path(folder) / "w.pt"))
    return {name: seconds / (nbytes / 1e9) for name, seconds in step.cpu_s.items()}


def row(later: Sequence[Steps], first: Steps | None, gigabytes: float) -> dict[str, dict[str, float]]:
    """The median of each step, per GB."""
    for steps in (*later, *([first] if first else [])):
        steps.cpu_s["all"], steps.wall_s["all"] = sum(steps.cpu_s.values()), sum(steps.wall_s.values())

    def median(get: Callable[[Steps], float]) -> float:
        return statistics.median(map(get, later))

    found = {
        name: {
            "cpu_s_per_gb": median(lambda steps, n=name: steps.cpu_s[n]) / gigabytes,
            "wall_s_per_gb": median(lambda steps, n=name: steps.wall_s[n]) / gigabytes,
            **({"first_cpu_s_per_gb": first.cpu_s[name] / gigabytes} if first else {}),
        }
        for name in later[0].cpu_s
    }
    return found | {"sent": {"share": median(lambda steps: steps.sent), "changed": median(lambda steps: steps.changed)}}


def judge(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """The verdict on every goal whose variant was measured."""
    return [
        goal.verdict(rows[way][step].get("cpu_s_per_gb", rows[way][step].get("share", 0.0)))
        for way, step, goal in GOALS
        if way in rows
    ]


def _plot(rows: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draw the CPU seconds of each step, one bar for each variant."""
    with plots.axes(path, 1, width=7) as (axis,):
        at = {name: 0.0 for name in rows}
        for step in [step for step in next(iter(rows.values())) if step not in {"all", "sent"}]:
            heights = [found.get(step, {}).get("cpu_s_per_gb", 0.0) for found in rows.values()]
            axis.bar(list(rows), heights, bottom=list(at.values()), label=step)
            at = {name: at[name] + height for name, height in zip(rows, heights, strict=True)}
        axis.set(ylabel="CPU s a GB")
        axis.legend(loc=(0.53, 0.58), fontsize="small")


def main() -> None:
    """Measure the pushes of each variant, print table and verdicts, and write them with the machine's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--layouts", nargs="*", choices=[*LLAMAS, SHARE_OF_7B], default=())
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--lr", type=float, nargs="*", default=(1e-6, 1e-5, 1e-4))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.layouts:
        return _write(options, _layouts(options))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not options.no_store:
        memory = int(5e9 * max(1.0, options.gigabytes))
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=memory, log_to_driver=False)
    _write(options, _layout(options) if options.layout else _one(options))


def _write(options: argparse.Namespace, content: Mapping[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")


def _one(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a model of `--gigabytes`."""
    layers = max(1, round(LAYERS_OF_A_GIGABYTE * options.gigabytes))
    settings = {**LLAMAS["500M"], "num_hidden_layers": layers}
    way = Way.of(store=not options.no_store, **settings)
    rows, others = measured(way, options)
    print(*map(told, judge(rows)), sep="\n")
    if options.plot:
        _plot(rows, options.plot)
    costs = {"push: CPU s a GB": rows[WHOLE]["all"]["cpu_s_per_gb"]}
    return {"costs": costs, "gigabytes": way.bytes / 1e9, "goals": judge(rows), "ways": rows, "beside": others}


def _layouts(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model after another, each in its own process, so that no memory of an earlier one is reused."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.layouts):
            path = Path(folder) / f"{number}.json"
            command = [sys.executable, __file__, "--layout", name, "--json", str(path), "--repeat", str(options.repeat)]
            command += ["--lr", *map(str, options.lr), *(["--no-store"] if options.no_store else [])]
            subprocess.run(command, check=True)
            found[name] = json.loads(path.read_text())["layout"]
    if options.plot:
        _plot({name: one["ways"][WHOLE] for name, one in found.items()}, options.plot)
    return {"layouts": found}


def _layout(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the model of `--layout`."""
    name, store = options.layout, not options.no_store
    way = Way.of_7b(store=store) if name == SHARE_OF_7B else Way.of(store=store, **LLAMAS[name])
    print(f"--- {name}: two sets of buckets take {way.memory:.2f} of the share", flush=True)
    rows, others = measured(way, options)
    still = way.stands_still() if way.serves and options.lr else None
    if still is not None:
        print(f"the learner stands still for {still:.2%} of a step on {TOKENS} tokens", flush=True)
    numbers = {"gigabytes": way.bytes / 1e9, "memory": way.memory, "stands_still": still}
    return {"layout": {**numbers, "ways": rows, "beside": others}}


def measured(way: Way, options: argparse.Namespace) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, float]]:
    """Measure every variant of a push with one model, and `beside`; print a line for each."""
    gigabytes, rows = way.bytes / 1e9, dict[str, dict[str, dict[str, float]]]()
    print(f"{gigabytes:.2f} GB; CPU seconds a GB")
    for name, later, first in ways(way, options):
        rows[name] = row(later, first, gigabytes)
        steps = {step: values["cpu_s_per_gb"] for step, values in rows[name].items() if "cpu_s_per_gb" in values}
        shares = rows[name]["sent"]
        print(f"{name:10}", *(f"{step} {seconds:.3f}" for step, seconds in steps.items()), end="  ")
        print(f"changed {shares['changed']:.3%}, sent {shares['share']:.3%}", flush=True)
    others = beside(way.bytes)
    print(*(f"{name} {seconds:.3f}" for name, seconds in others.items()))
    return rows, others


if __name__ == "__main__":
    main()
