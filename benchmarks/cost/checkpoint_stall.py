"""The learner's stall for a checkpoint by model size: one thread, one rank, AdamW with its moments.

python benchmarks/cost/checkpoint_stall.py [--json out.json]

waits     the learner waits until the checkpoint has its final name
beside    as in a run: the learner continues once its state is copied; `named_s` is the time until the final name
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine
from streamppo.config import file as configfile
from streamppo.learner.checkpoint import checkpoint
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.model import load_policy, optimizer
from streamppo.weights.pusher import PushedVersion

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
WIDTHS = {"small": 32, "large": 768}
LAYERS = {"small": 2, "large": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        rows = [_measure(size, Path(folder) / size, options.times) for size in WIDTHS]
        dist.destroy_process_group()
    result = {"machine": machine(), "times": options.times, "models": rows}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _measure(size: str, folder: Path, times: int) -> dict[str, Any]:
    trained, saver = _trained(size, folder)
    waits_s: list[float] = []
    beside_s: list[float] = []
    named_s: list[float] = []
    for version in range(1, 2 * times + 1):
        begin = time.perf_counter()
        _save(trained, saver, folder / "checkpoints", version)
        left_s = time.perf_counter() - begin
        saver.wait()
        whole_s = time.perf_counter() - begin
        if version % 2:
            waits_s.append(whole_s)
        else:
            beside_s.append(left_s)
            named_s.append(whole_s)
    (newest, *_) = sorted((folder / "checkpoints").iterdir(), reverse=True)
    return {
        "parameters": sum(one.numel() for one in trained.policy.parameters()),
        "mib": round(sum(file.stat().st_size for file in newest.iterdir()) / 2**20, 1),
        "waits_s": round(statistics.median(waits_s), 4),
        "beside_s": round(statistics.median(beside_s), 4),
        "named_s": round(statistics.median(named_s), 4),
    }


def _trained(size: str, folder: Path) -> tuple[checkpoint.TrainState, checkpoint.Saver]:
    """A model with an optimizer whose moments exist."""
    config, width = configfile.load(MATH, []), WIDTHS[size]
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": LAYERS[size]}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=16, **shape, **heads)).save_pretrained(folder)
    mesh = init_device_mesh("cpu", (1,))
    made = load_policy.load(config.model, folder, 1.0, mesh, config.algorithm.critic.model)
    adamw = optimizer.adamw(made, config)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    adamw.zero_grad(set_to_none=True)
    return checkpoint.TrainState(made, adamw, None), checkpoint.Saver(config.checkpoint)


def _save(trained: checkpoint.TrainState, saver: checkpoint.Saver, folder: Path, version: int) -> None:
    pushed = Future[PushedVersion]()
    pushed.set_result(PushedVersion("", 0.0, 0))
    state = CheckpointState(version=version, digest="", ranks=1, beta=0.0, bad_steps=(0, 0))
    saver.start(folder, state, trained, pushed)


if __name__ == "__main__":
    main()
