"""An update of the learner compared with a bare loop of the same mathematics: CPU milliseconds and their ratio.

    python benchmarks/cost/bare_update.py --json bare.json [--rounds 7] [--times 10]
        [model.tiny.hidden_size=256 ...]

The bare loop is written only for configs/math.toml with the rule `PLAIN`: plain torch and transformers, one
micro-batch, no ranks, no FSDP, no checks, no metrics. It packs rows as the learner does, with the samples of a prompt
in one row, and steps the same optimizer. `plain rows` is the same loop with one sample per row. One thread; the
variants alternate, and each round gives one number: reported are median, least and greatest. A check confirms that both
make the same weights from one batch.

Goal, set before the first run: an update costs at most 1.10 times as much as the bare loop.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import world
from benchmarks.lib.runs import PLAIN, Goal, machine, table, told
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.attention import attention, prefix_sharing
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import optimizer, policy, tiny
from streamppo.learner.model.policy import Policy
from streamppo.learner.update_metrics import update_metrics
from streamppo.types import Batch

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
GOAL = Goal("an update over the bare loop, CPU time", most=1.10)
ALIKE = 1e-4
"""Largest difference of a weight that counts as rounding: 1/8 of AdamW's first step, whose sign may be chance."""
CAP, CLIP, VALUE_CLIP, VALUE, ENTROPY, FLOOR = 2.0, 0.2, 0.2, 0.5, 0.01, 1e-8
"""Values of `PLAIN` and the defaults: cap of weights, both clips, coefficients, floor of a variance."""


class Bare(nn.Module):
    """The causal LM in a folder, and a value head initialised to zero."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.lm: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        self.value = nn.Linear(self.lm.config.hidden_size, 1)
        for parameter in self.value.parameters():
            nn.init.zeros_(parameter)


def bare_update(model: Bare, adamw: torch.optim.Optimizer, config: Config, batch: PaddedBatch, *, share: bool) -> None:
    """One step of PPO on one batch: GAE with lambda 1, whitened; truncated weights; clipped ratios and values."""
    width_B = batch.start_B + batch.length_B
    if share:
        reading = prefix_sharing.lay_out(batch.inputs_BL, batch.start_B, width_B, model.lm.config.hidden_size)
    else:
        reading = attention.padded(batch.inputs_BL, width_B)
    hidden_ND = model.lm.base_model(**reading.arguments, use_cache=False).last_hidden_state.flatten(0, 1)
    mask_BT = batch.mask_BT
    at_BT = (batch.start_B[:, None] + torch.arange(mask_BT.shape[1])).clamp(max=batch.inputs_BL.shape[1] - 1)
    before_N = reading.index_BL.gather(1, at_BT - 1)[mask_BT]
    tokens_N = batch.inputs_BL.gather(1, at_BT)[mask_BT]
    picked_ND = hidden_ND[before_N]
    logp_NV = model.lm.lm_head(picked_ND).log_softmax(-1)
    logprobs_N = logp_NV.gather(-1, tokens_N[:, None])[:, 0]
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    values_N = model.value(picked_ND)[:, 0]
    returns_N = batch.reward_B[:, None].expand(mask_BT.shape)[mask_BT]
    with torch.no_grad():
        raw_N = (returns_N - values_N).double()
        advantages_N = ((raw_N - raw_N.mean()) * (raw_N.var(unbiased=False) + FLOOR).rsqrt()).float()
        weights_N = (logprobs_N - batch.behavior_logprobs_BT[mask_BT]).exp().clamp(max=CAP)
    ratio_N = (logprobs_N - logprobs_N.detach()).exp()
    gain_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantages_N)
    moved_N = values_N.detach() + (values_N - values_N.detach()).clamp(-VALUE_CLIP, VALUE_CLIP)
    value_N = 0.5 * torch.maximum((values_N - returns_N).square(), (moved_N - returns_N).square())
    loss = (-weights_N * gain_N + VALUE * value_N - ENTROPY * entropy_N).mean()
    adamw.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_grad_norm)
    adamw.step()


def loaded(folder: Path, config: Config) -> tuple[Bare, torch.optim.Optimizer]:
    """The bare model in a folder, and the optimizer of `config` as after warm-up."""
    model = Bare(folder)
    groups = [{"params": list(model.lm.parameters())}, {"params": list(model.value.parameters())}]
    adamw = torch.optim.AdamW(groups, lr=config.learner.lr, fused=True)
    optimizer.configure(adamw, config)
    return model, adamw


def difference(model: Bare, trained: Policy) -> float:
    """The largest absolute difference of a weight between the two models."""
    weights = policy.gather_weights(trained, "float32")
    return max(float((one.detach() - weights[name]).abs().max()) for name, one in model.lm.named_parameters())


def _cpu_ms(call: Callable[[], object], times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        call()
    return 1e3 * (time.process_time() - begin) / times


async def measure(config: Config, folder: Path, rounds: int, times: int) -> tuple[dict[str, list[float]], float]:
    """(CPU milliseconds of each variant by round, largest difference of a weight after one update of each)."""
    tiny.make(config, folder / "model")
    made = await world.build(config, folder / "model", slots=192, max_total_tokens=16)
    updater = made.updater
    batch = pad(Batch(version=0, min_version=0, trajectories=tuple(await world.next_batch(made, 0, 0))))
    ways: dict[str, Callable[[], object]] = {}
    for name, share in (("bare loop", True), ("bare loop, plain rows", False)):
        ways[name] = partial(bare_update, *loaded(folder / "model", config), config, batch, share=share)
    model, adamw = loaded(folder / "model", config)
    bare_update(model, adamw, config, batch, share=True)
    updater.update(batch)
    apart = difference(model, updater.policy)
    ways["update"] = lambda: updater.update(batch)
    ways["update and its metrics"] = lambda: update_metrics(updater, updater.update(batch))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            found[name].append(_cpu_ms(way, times))
    return {name: some[1:] for name, some in found.items()}, apart


def main() -> None:
    """Measure, print a table and the verdict, and write both with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=10, help="updates of each way in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = configfile.load(CONFIG, [*PLAIN, *options.overrides])
    with tempfile.TemporaryDirectory() as folder:
        world.alone(Path(folder))
        found, apart = asyncio.run(measure(config, Path(folder), options.rounds, options.times))
        torch.distributed.destroy_process_group()
    bare = found["bare loop"]
    rows = [
        {
            "way": name,
            "cpu_ms": round(statistics.median(some), 1),
            "least": round(min(some), 1),
            "most": round(max(some), 1),
            "over_bare": round(statistics.median(a / b for a, b in zip(some, bare, strict=True)), 3),
        }
        for name, some in found.items()
    ]
    verdict = GOAL.verdict(*(a / b for a, b in zip(found["update"], bare, strict=True)))
    print(table(rows), told(verdict), f"largest difference of a weight after one update: {apart:.1e}", sep="\n")
    if apart > ALIKE:
        sys.exit("the bare loop computes something else")
    if options.json:
        result = {"machine": machine(), "goal": verdict, "difference": apart, "ways": rows, "rounds": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
