"""The default task in one process without Ray: sample, update and swap in turns."""

import statistics
import time
from pathlib import Path

import torch

from benchmarks.lib import world
from benchmarks.lib.pace import Fixed, step
from streamppo.config import file as configfile
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import tiny
from streamppo.types import Batch

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
UPDATES = 400
PHASES = ("sample_ms", "update_ms", "swap_ms")
Result = dict[str, object]


async def train(folder: Path, device: str, seconds: float) -> Result:
    """Train for `seconds`; return held-out accuracy before and after, and the median milliseconds of each phase."""
    overrides = ["model.dtype=bfloat16", f"updates={UPDATES}", "learner.decay=constant", "checkpoint.every=0"]
    config = configfile.load(MATH, overrides if device == "cuda" else [*overrides, "model.tiny.max_steps=10"])
    tiny.make(config, folder / "model")
    slots, dtype = config.rollout.slots, torch.bfloat16
    made = await world.build(config, folder / "model", slots=slots, max_total_tokens=32, device=device, dtype=dtype)
    before, pace = await world.accuracy(made), Fixed(0)
    phases: list[tuple[float, float, float]] = []
    end, mismatch = time.monotonic() + seconds, []
    while time.monotonic() < end and len(phases) < UPDATES:
        version, begin = len(phases), time.perf_counter()
        rows = tuple(await world.next_batch(made, version, version))
        sampled = time.perf_counter()
        metrics = step(made, pace, pad(Batch(version=version, min_version=version, trajectories=rows))).metrics
        learned = time.perf_counter()
        await made.swap(version + 1)
        phases.append((sampled - begin, learned - sampled, time.perf_counter() - learned))
        mismatch.append(metrics["mismatch"])
    after = await world.accuracy(made)
    await made.engine.stop()
    medians = (round(1e3 * statistics.median(column), 2) for column in zip(*phases, strict=True))
    return {
        "updates": len(phases),
        "accuracy_before": before,
        "accuracy_after": after,
        "mismatch": statistics.mean(mismatch),
        **dict(zip(PHASES, medians, strict=True)),
    }
