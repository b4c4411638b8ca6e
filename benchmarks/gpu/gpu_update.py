"""Updates of the real learner on a model of half a billion parameters, by variant: tokens/s, memory against `check`.

    python -m benchmarks.gpu.gpu_update --json update.json
    python -m benchmarks.gpu.gpu_update --json update.json --variants base fsdp compiled --times 3

It needs torch, transformers and this repository. The first update has rows of other lengths than the rest, and is not
timed, nor is the second. `bits` is a sum over all bits of the weights after the last one: it is equal for variants that
guarantee equal weights. `redone` is true if the updates after the first, done again in a process that has compiled
nothing, as in a resumed run, give the same bits. With `--profile`, `kernels` are those that took most of one more
update, with their number and milliseconds, and `host` the Python functions that took most of another one, without what
they call. Results are written after every variant; on a CPU all sizes are small.
"""

import os

# As in ranks; torch reads it at import.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import copy
import cProfile
import gc
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner import device as of_rank
from streamppo.learner import memory as rank_memory
from streamppo.learner.attention import layers
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import load_policy, optimizer
from streamppo.learner.model.policy import local
from streamppo.learner.objective import objective
from streamppo.learner.update import Updater
from streamppo.learner.update_metrics import update_metrics
from streamppo.types import Batch, Identity, Trajectory

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, MEAN, MOST, BUDGET = (128, 500, 2048, 16384) if ON_GPU else (16, 12, 40, 128)
LARGE: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1000}
FULL, NOT_EXACT = "model.gradient_checkpointing=full", "learner.exact=false"
COMPILE = "model.compile=true", NOT_EXACT
SDPA, FA4 = "model.attention=sdpa", "model.attention=flash_attention_4"
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "compiled": COMPILE,
    "sdpa": (SDPA,),
    "unshared": ("model.share_prompts=false",),
    "compiled_not_exact": COMPILE,
    "compiled_32k": (*COMPILE, f"learner.micro_batch_tokens={2 * BUDGET}"),
    "full": (FULL,),
    "compiled_full": (*COMPILE, FULL),
    "sdpa_compiled": (SDPA, *COMPILE),
    "sdpa_full": (SDPA, FULL),
    "fsdp": (),
    "not_exact": (NOT_EXACT,),
    "fa4": (FA4,),
    "fa4_compiled": (FA4, *COMPILE),
}
"""Overrides of configs/gsm8k-qwen2.5-0.5b.toml without checkpointing. Variants with `fsdp` in their name use FSDP with
one rank; of the others, torch computes deterministically but for those with `not_exact`."""
Result = dict[str, Any]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, required=True, help="file for the results")
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    made.add_argument("--times", type=int, default=3, help="updates after the first")
    made.add_argument("--profile", action="store_true", help="one more update, with its kernels")
    options = made.parse_args()
    of_rank.acquire(float(ON_GPU))
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder, alone(Path(folder)):
        for name in options.variants:
            found[name] = tried(name, Path(folder) / "model", options.times, profile=options.profile)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
            print(name, json.dumps(found[name]), flush=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A process group with only this process, and a model with random weights in `folder`."""
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = Qwen2ForCausalLM(model_config()).to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    model.to("cpu").save_pretrained(folder / "model")
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_config() -> Qwen2Config:
    heads = 14 if ON_GPU else 4
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 299, "pad_token_id": 298, "tie_word_embeddings": True}
    sizes = {**(LARGE if ON_GPU else SMALL), "num_attention_heads": heads, "num_key_value_heads": 2}
    return Qwen2Config(**sizes, **ends, max_position_embeddings=4096)


def tried(name: str, model: Path, times: int, *, profile: bool = False) -> Result:
    """The results of a variant, or its error."""
    before, compiled = load_policy.is_whole, torch.compile
    if "fsdp" in name:
        load_policy.is_whole = rank_memory.is_whole = lambda *_, **__: False
    if not ON_GPU:
        # No kernels are compiled, which would take minutes.
        layers.torch.compile = lambda *given, options, **words: compiled(*given, **words, backend="aot_eager")
    torch._dynamo.reset()
    try:
        return measured(name, model, times, profile=profile)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:600]}"}
    finally:
        load_policy.is_whole = rank_memory.is_whole = before
        torch.compile = compiled
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


def measured(name: str, model: Path, times: int, *, profile: bool = False) -> Result:
    where = f"learner.gpus={int(ON_GPU)}", f"rollout.gpus={int(ON_GPU)}"
    sizes = f"queue.batch_size={ROWS}", f"learner.micro_batch_tokens={BUDGET}", "learner.minibatches=2"
    overrides = [f"model.path={model}", "model.gradient_checkpointing=auto", *sizes, *where, *VARIANTS[name]]
    config = configfile.load(ROOT / "configs" / "gsm8k-qwen2.5-0.5b.toml", overrides)
    torch.use_deterministic_algorithms(ON_GPU and "not_exact" not in name)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    mesh = init_device_mesh(DEVICE, (1,))
    policy = load_policy.load(config.model, model, config.rollout.temperature, mesh)
    adamw = optimizer.adamw(policy, config)
    updater = Updater(policy, adamw, objective.build(config), config, group=mesh.get_group())
    rows, first = batch(), pad(batch(seed=8)).to(updater.device)
    padded = pad(rows).to(updater.device)
    seconds = [timed(updater, first)]
    before = kept(updater)
    # The second is slower too, in a process's first variant.
    timed(updater, padded)
    seconds += [timed(updater, padded) for _ in range(times)]
    bits = sum_of_bits(updater)
    more = {**kernels(updater, padded), "host": host(updater, padded)} if profile else {}
    peak = memory(config, max(len(one.prompt_tokens) // 4 + one.num_tokens for one in rows.trajectories))
    torch._dynamo.reset()
    restore(updater, before)
    for _ in range(1 + times):
        timed(updater, padded)
    lengths = [len(one.prompt_tokens) // 4 + one.num_tokens for one in rows.trajectories]
    sampled, s = sum(one.num_tokens for one in rows.trajectories), statistics.median(seconds[1:])
    return {
        "attention": policy.lm.config._attn_implementation,
        "tokens": sum(lengths),
        "first_s": round(seconds[0], 3),
        "s": round(s, 3),
        "all_s": [round(one, 3) for one in seconds],
        "tokens_per_s": round(sum(lengths) / s),
        "tflops": round(flops(lengths, sampled) / s / 1e12, 1),
        "bits": bits,
        "redone": bits == sum_of_bits(updater),
        **peak,
        **more,
    }


def sum_of_bits(updater: Updater) -> int:
    bits = [local(one).detach().view(torch.int32).to(torch.int64).sum() for one in updater.policy.parameters()]
    return int(torch.stack(bits).sum())


def kept(updater: Updater) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Copies, in the host's memory, of the weights and of the optimizer's state."""
    weights = [local(one).detach().to("cpu", copy=True) for one in updater.policy.parameters()]
    return weights, copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.cpu, updater.optimizer.state_dict()))


@torch.no_grad()
def restore(updater: Updater, state: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    for weight, before in zip(updater.policy.parameters(), state[0], strict=True):
        local(weight).copy_(before)
    updater.optimizer.load_state_dict(state[1])


def kernels(updater: Updater, padded: PaddedBatch) -> Result:
    """What one more update does on the device: seconds, launches, and the kernels that take most of it."""
    activity = torch.profiler.ProfilerActivity.CUDA if ON_GPU else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        s = timed(updater, padded)
    done: dict[str, list[float]] = {}
    for event in profile.key_averages():
        took = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
        one = done.setdefault(event.key[:100], [0, 0.0])
        one[0], one[1] = one[0] + event.count, one[1] + took / 1e3
    most = sorted(done.items(), key=lambda item: -item[1][1])
    totals = {"launches": int(sum(n for n, _ in done.values())), "device_s": sum(ms for _, ms in done.values()) / 1e3}
    return {"profiled_s": s, **totals, "kernels": [[name, n, round(ms, 1)] for name, (n, ms) in most[:40]]}


def host(updater: Updater, padded: PaddedBatch) -> list[list[Any]]:
    """The Python functions that take most of an update by themselves: place, calls, milliseconds."""
    with cProfile.Profile() as profile:
        timed(updater, padded)
    profiled: Any = pstats.Stats(profile)
    took = {
        f"{Path(file).name}:{line} {name}": (n, own) for (file, line, name), (_, n, own, *_) in profiled.stats.items()
    }
    most = sorted(took.items(), key=lambda item: -item[1][1])
    return [[name, n, round(1e3 * own, 1)] for name, (n, own) in most[:30]]


def timed(updater: Updater, padded: PaddedBatch) -> float:
    """Seconds of one update and its metrics."""
    if ON_GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    update_metrics(updater, updater.update(padded))
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def memory(config: Config, longest: int) -> Result:
    """GiB: the peak, torch's reserved memory, and the estimate of `check`, which assumes a full micro-batch."""
    said = rank_memory.rank(config, rank_memory.sizes(model_config(), config.model), longest)
    parts = {name: round(size / 2**30, 2) for name, size in {**said._asdict(), "all": said.total}.items()}
    if not ON_GPU:
        return {"check_gib": parts}
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gib": round(peak / 2**30, 2), "reserved_gib": round(reserved / 2**30, 2), "check_gib": parts}


def batch(seed: int = 7) -> Batch:
    """Rows of lognormal lengths, eight for each prompt."""
    generator, vocabulary = np.random.default_rng(seed), model_config().vocab_size
    rows: list[Trajectory] = []
    prompt = np.zeros(0, np.int32)
    for number in range(ROWS):
        if number % 8 == 0:
            width = int(np.clip(generator.lognormal(5, 0.5), 8, 400)) if ON_GPU else 6
            prompt = generator.integers(0, 200, width).astype(np.int32)
        count = int(np.clip(generator.lognormal(np.log(MEAN) - 0.32, 0.8), 4, MOST))
        tokens = generator.integers(0, vocabulary, count).astype(np.int32)
        logprobs = (-np.log(vocabulary) + 0.05 * generator.standard_normal(count)).astype(np.float32)
        row = Trajectory(
            identity=Identity(task="t", prompt=number // 8, sample=number % 8),
            actor="rollout-0",
            prompt_tokens=prompt.tobytes(),
            tokens=tokens.tobytes(),
            logprobs=logprobs.tobytes(),
            versions=np.zeros(count, np.int32).tobytes(),
            mask=bytes([1]) * count,
            finish="stop",
            reward=float(generator.integers(0, 2)),
        )
        rows.append(row)
    return Batch(version=0, min_version=0, trajectories=tuple(rows))


def flops(lengths: Sequence[int], sampled: int) -> float:
    """Floating-point operations of an update, without recomputation, and with the head only for sampled tokens."""
    config: Any = model_config()
    width, depth = config.hidden_size, config.num_hidden_layers
    pair = width * config.num_key_value_heads // config.num_attention_heads
    dense = depth * (2 * width * width + 2 * width * pair + 3 * width * config.intermediate_size)
    attention = sum(6 * depth * width * length * length for length in lengths)
    return 6 * dense * sum(lengths) + 6 * config.vocab_size * width * sampled + attention


if __name__ == "__main__":
    main()
