"""How long ranks take to load a large model, and how much memory each needs: by itself, and sent by rank 0.

python benchmarks/load.py [--ranks 2] [--layers 24] [--times 3] [--json out.json]

The model has random weights, in bfloat16 files of several parts. `peak` is the most memory that a process had while it
loaded, less what it had before; pages of files, which the system can take back, do not count.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.runs import machine
from streamppo.config import file as configfile
from streamppo.learner import policy, weight_files

MATH = Path(__file__).parent.parent / "configs" / "math.toml"
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
WAYS = {"each rank its rows": weight_files.LARGE, "sent by rank 0": 2**62}
"""The bytes of files above which every rank reads its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        lm = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=options.layers)).bfloat16()
        parameters = sum(one.numel() for one in lm.parameters())
        lm.save_pretrained(model, max_shard_size="200MB")
        del lm
        ways = {way: [_load(model, options.ranks, above) for _ in range(options.times)] for way, above in WAYS.items()}
    float32 = 4 * parameters / 2**20
    rows = [
        {
            "way": way,
            "seconds": statistics.median(max(one["seconds"] for one in time) for time in times),
            "peak_mib": [statistics.median(time[rank]["peak_mib"] for time in times) for rank in range(options.ranks)],
        }
        for way, times in ways.items()
    ]
    result = {"machine": machine(), "parameters": parameters, "float32_mib": float32, "rows": rows, "all": ways}
    print(json.dumps({"float32_mib": float32, "rows": rows}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _load(model: Path, ranks: int, above: int) -> list[dict[str, float]]:
    """Load once, in processes of its own, and return the numbers of every rank."""
    context = multiprocessing.get_context("spawn")
    answers, port = context.SimpleQueue(), _free_port()
    workers = [context.Process(target=_rank, args=(rank, ranks, port, model, above, answers)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    found = sorted((answers.get() for _ in workers), key=lambda one: one["rank"])
    for worker in workers:
        worker.join()
    return found


def _rank(rank: int, ranks: int, port: int, model: Path, above: int, answers: Any) -> None:
    torch.set_num_threads(1)
    weight_files.LARGE = above
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    config, mesh = configfile.load(MATH, []), init_device_mesh("cpu", (ranks,))
    before, begin, seen = _own_mib(), time.perf_counter(), [0.0]
    Thread(target=_watch, args=(seen,), daemon=True).start()
    policy.load(config.model, model, 1.0, mesh)
    seconds = time.perf_counter() - begin
    answers.put({"rank": rank, "seconds": seconds, "peak_mib": max(seen[0], _own_mib()) - before})
    dist.barrier()
    dist.destroy_process_group()


def _watch(seen: list[float]) -> None:
    while True:
        seen[0] = max(seen[0], _own_mib())
        time.sleep(0.005)


def _own_mib() -> float:
    """The memory of this process, without the pages of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    main()
