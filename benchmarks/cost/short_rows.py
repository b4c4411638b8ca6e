"""Attention of short rows, and norms, on a CPU, forward and backward, compared with transformers: CPU milliseconds.

    python benchmarks/cost/short_rows.py --json short-rows.json [--rounds 5] [--tokens 16 22 48 64 128]

Both variants are the attention module of a Qwen2 layer without its weight products, which are the same: rotary
positions, scores, softmax. A causal mask is passed explicitly, as for rows with several samples. The table then has one
RMS norm of as many tokens, for models of several widths. One thread; the variants alternate, medians over rounds.
Above `streamppo.learner.attention.short_rows.LONGEST` tokens the learner uses transformers' attention.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RMSNorm, Qwen2RotaryEmbedding

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine, table
from streamppo.learner.attention import short_rows
from streamppo.learner.model import norms

TOKENS = 4096
"""The number of tokens in all rows together."""
TIMES = 5


def measure(width: int, heads: int, of_head: int, rounds: int) -> dict[str, Any]:
    """CPU milliseconds of both variants, for rows of `width` tokens and `heads` heads of width `of_head`."""
    rows, model_width = max(1, TOKENS // width), heads * of_head
    config = Qwen2Config(hidden_size=model_width, num_attention_heads=heads, num_key_value_heads=heads)
    config._attn_implementation = "sdpa"
    module: Any = Qwen2Attention(config, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(module, name, torch.nn.Identity())
    hidden = torch.randn(rows, width, model_width, requires_grad=True)
    positions = Qwen2RotaryEmbedding(config)(hidden.detach(), torch.arange(width).expand(rows, width))
    gradient = torch.randn(rows, width, model_width)
    mask = torch.ones(rows, 1, width, width, dtype=torch.bool).tril_()
    longest, short_rows.LONGEST = short_rows.LONGEST, width
    ways: dict[str, Callable[[], Tensor]] = {
        "theirs": lambda: module(hidden, positions, mask)[0],
        "ours": lambda: short_rows.attend(module, module.forward, hidden, positions, mask)[0],
    }
    found = _in_turns(ways, gradient, rounds)
    short_rows.LONGEST = longest
    return {"rows": rows, "tokens": width, "heads": heads, "width": of_head, **found}


def measure_norm(width: int, rounds: int) -> dict[str, Any]:
    """CPU milliseconds of both variants, for one norm of a model of this width."""
    theirs, ours = Qwen2RMSNorm(width), Qwen2RMSNorm(width)
    hidden = torch.randn(TOKENS, width, requires_grad=True)
    ways = {"theirs": lambda: theirs(hidden), "ours": lambda: norms.normalise(ours, ours.forward, hidden)}
    return {"rows": TOKENS, "tokens": 1, "heads": "norm", "width": width, **_in_turns(ways, hidden.detach(), rounds)}


def _in_turns(ways: Mapping[str, Callable[[], Tensor]], gradient: Tensor, rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begin = time.process_time()
            for _ in range(TIMES):
                way().backward(gradient)
            found[name].append(1e3 * (time.process_time() - begin) / TIMES)
    # The first round warms up.
    return {name: statistics.median(some[1:]) for name, some in found.items()}


def main() -> None:
    """Measure all sizes, print a table, and write it with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 22, 32, 48, 64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    lines = [measure(width, 8, of_head, options.rounds) for of_head in (8, 64) for width in options.tokens]
    lines += [measure_norm(width, options.rounds) for width in (64, 256, 1024)]
    for line in lines:
        line["share"] = line["ours"] / line["theirs"]
    print(table(lines))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "sizes": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
