"""Updates of the real learner on a model of half a billion parameters, by variant: tokens/s, memory against `check`.

    python -m benchmarks.gpu.gpu_update --json update.json
    python -m benchmarks.gpu.gpu_update --json update.json --variants base fsdp off --times 3

It needs torch, transformers and this repository. `bits` is a sum over all bits of the weights after the last update:
it is equal for variants that guarantee equal weights. Results are written after every variant; on a CPU all sizes are
small.
"""

import os

# As in ranks; torch reads it at import.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import gc
import json
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
from streamppo.types import Batch, Identity, Trajectory

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, MEAN, MOST, BUDGET = (128, 500, 2048, 16384) if ON_GPU else (16, 12, 40, 128)
LARGE: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1000}
OFF, COMPILE = "model.gradient_checkpointing=off", ("model.compile=true", "learner.exact=false")
FA4 = "model.attention=flash_attention_4"
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "fsdp": (),
    "off": (OFF,),
    "off_fsdp": (OFF,),
    "off_not_exact": (OFF, "learner.exact=false"),
    "off_32k": (OFF, f"learner.micro_batch_tokens={2 * BUDGET}"),
    "fa4": (FA4,),
    "fa4_off": (FA4, OFF),
    "off_compiled": (OFF, *COMPILE),
    "compiled": COMPILE,
    "fa4_off_compiled": (FA4, OFF, *COMPILE),
}
"""Overrides of configs/gsm8k-qwen2.5-0.5b.toml; variants with `fsdp` in their name use FSDP with one rank."""
Result = dict[str, Any]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, required=True, help="file for the results")
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    made.add_argument("--times", type=int, default=3, help="updates after the first")
    options = made.parse_args()
    of_rank.acquire(float(ON_GPU))
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder, alone(Path(folder)):
        for name in options.variants:
            found[name] = tried(name, Path(folder) / "model", options.times)
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


def tried(name: str, model: Path, times: int) -> Result:
    """The results of a variant, or its error."""
    before, compiled = load_policy.is_whole, torch.compile
    if "fsdp" in name:
        load_policy.is_whole = lambda *_, **__: False
    if not ON_GPU:
        # No kernels are compiled, which would take minutes.
        layers.torch.compile = lambda *given, **words: compiled(*given, **words, backend="aot_eager")
    try:
        return measured(name, model, times)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:600]}"}
    finally:
        load_policy.is_whole, torch.compile = before, compiled
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


def measured(name: str, model: Path, times: int) -> Result:
    where = f"learner.gpus={int(ON_GPU)}", f"rollout.gpus={int(ON_GPU)}"
    sizes = f"queue.batch_size={ROWS}", f"learner.micro_batch_tokens={BUDGET}", "learner.minibatches=2"
    overrides = [f"model.path={model}", *sizes, *where, *VARIANTS[name]]
    config = configfile.load(ROOT / "configs" / "gsm8k-qwen2.5-0.5b.toml", overrides)
    torch.use_deterministic_algorithms(ON_GPU and config.learner.exact)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    mesh = init_device_mesh(DEVICE, (1,))
    policy = load_policy.load(config.model, model, config.rollout.temperature, mesh)
    adamw = optimizer.adamw(policy, config)
    updater = Updater(policy, adamw, objective.build(config), config, group=mesh.get_group())
    rows = batch()
    padded = pad(rows).to(updater.device)
    seconds = [timed(updater, padded) for _ in range(times + 1)]
    lengths = [len(one.prompt_tokens) // 4 + one.num_tokens for one in rows.trajectories]
    sampled, s = sum(one.num_tokens for one in rows.trajectories), statistics.median(seconds[1:])
    bits = [local(one).detach().view(torch.int32).to(torch.int64).sum() for one in policy.parameters()]
    return {
        "attention": policy.lm.config._attn_implementation,
        "tokens": sum(lengths),
        "first_s": round(seconds[0], 3),
        "s": round(s, 3),
        "all_s": [round(one, 3) for one in seconds],
        "tokens_per_s": round(sum(lengths) / s),
        "tflops": round(flops(lengths, sampled) / s / 1e12, 1),
        "bits": int(torch.stack(bits).sum()),
        **memory(config, max(lengths)),
    }


def timed(updater: Updater, padded: PaddedBatch) -> float:
    """Seconds of one update and its metrics."""
    if ON_GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    updater.metrics(updater.update(padded))
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


def batch() -> Batch:
    """Rows of lognormal lengths, eight for each prompt."""
    generator, vocabulary = np.random.default_rng(7), model_config().vocab_size
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
