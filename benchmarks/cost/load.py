"""Time and memory of ranks that load a large model: each rank reads its own rows, or rank 0 sends them.

python benchmarks/cost/load.py [--ranks 2] [--layers 24] [--times 3] [--json out.json]

The model has random weights, in bfloat16 files of several parts. `peak` is the peak memory of a process while it loads,
less its memory before; file pages, which the system can reclaim, do not count.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.ranks import most_memory, of_ranks
from benchmarks.lib.runs import machine
from streamppo.config import file as configfile
from streamppo.learner.model import load_policy, weight_files

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
WAYS = {"each rank its rows": weight_files.LARGE, "sent by rank 0": 2**62}
"""The size of the files in bytes above which every rank reads its own rows."""


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
        ways = {
            way: [of_ranks(load, options.ranks, model, above) for _ in range(options.times)]
            for way, above in WAYS.items()
        }
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


def load(model: Path, above: int) -> dict[str, float]:
    """Load the model once; `above` is the file size above which every rank reads its own rows."""
    weight_files.LARGE = above
    config, mesh = configfile.load(MATH, []), init_device_mesh("cpu", (dist.get_world_size(),))
    begin = time.perf_counter()
    with most_memory() as peak:
        load_policy.load(config.model, model, 1.0, mesh)
        return {"seconds": time.perf_counter() - begin, "peak_mib": peak()}


if __name__ == "__main__":
    main()
