"""Completions of random lengths, for tails.py and beside_trl.py: token limits, a reward, and a model without an end.

The model answers as usual, ends its answer with its end-of-sequence token, and is sampled on until the drawn length:
its folder has no token that ends a completion. All tokens are sampled and trained on; the reward reads only the answer,
up to the first end-of-sequence token.

    python benchmarks/lib/lengths.py --plot lengths.png      the drawn lengths
"""

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import plots
from streamppo.tasks.tokenizer import END, SPECIALS
from streamppo.types import Identity, Prompt, ScoredText

MEDIAN = int(os.environ.get("BENCHMARK_MEDIAN", "8"))
"""The median length in tokens."""
LONGEST = int(os.environ.get("BENCHMARK_LONGEST", 64 * MEDIAN))
"""The largest length in tokens; longer draws are clamped."""
SHORTEST = 4
"""The smallest length, that of a three-digit answer and its end; also the limit of evaluations."""
CONTEXT = 640
"""The context length of the model without an end: more than a prompt and the longest completion."""
SIGMA, TAIL = 1.0, 1.3
"""Standard deviation of the logarithm; index of the Pareto distribution."""
SEED = 1
NORMAL = NormalDist()
DRAWN = 20_000
"""Completions in the plot."""


def equal(prompt: Prompt, identity: Identity | None) -> int:
    """Return the median length for every completion."""
    return SHORTEST if identity is None else MEDIAN


def lognormal(prompt: Prompt, identity: Identity | None) -> int:
    """Draw a length from a lognormal distribution."""
    return _drawn(identity, lambda share: MEDIAN * math.exp(SIGMA * NORMAL.inv_cdf(share)))


def pareto(prompt: Prompt, identity: Identity | None) -> int:
    """Draw a length from a Pareto distribution."""
    return _drawn(identity, lambda share: MEDIAN * (2 * (1 - share)) ** (-1 / TAIL))


SHAPES = {"equal": equal, "lognormal": lognormal, "pareto": pareto}


def draw(shape: str, prompt: int, sample: int, attempt: int = 0) -> int:
    """Return the length of one trajectory under `rollout.limit = "benchmarks.lib.lengths:SHAPE"`."""
    identity = Identity(task="", prompt=prompt, sample=sample, attempt=attempt)
    return SHAPES[shape](Prompt(text="", columns={}), identity)


def overrides(shape: str) -> list[str]:
    """Return the overrides of a run with drawn lengths; its model must be one without an end."""
    return [
        f"rollout.limit=benchmarks.lib.lengths:{shape}",
        f"rollout.max_tokens={LONGEST}",
        "reward.function=benchmarks.lib.lengths:score",
        "reward.where=actor",
    ]


def _drawn(identity: Identity | None, quantile: Callable[[float], float]) -> int:
    """Return the quantile at a share that depends only on the identity."""
    if identity is None:
        return SHORTEST
    name = f"{SEED}/{identity.prompt}/{identity.sample}/{identity.attempt}"
    number = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")
    return max(SHORTEST, min(LONGEST, round(quantile((number + 0.5) / 2**48))))


def is_right(tokens: Sequence[int], text: str, answer: str) -> bool:
    """True if a completion begins with the answer and an end token. Each token that is not special is one character."""
    end = tokens.index(END) if END in tokens else -1
    return end >= 0 and min(tokens[:end], default=0) >= SPECIALS and text[:end] == answer


async def score(trajectory: ScoredText, answer: str) -> float:
    """Score 1.0 for a completion that begins with the answer and an end token, else 0.0."""
    return float(is_right(trajectory.token_ids, trajectory.completion, answer))


def make_models(config: Path, folder: Path) -> tuple[Path, Path]:
    """Make the warm-started model of a configuration and a copy without an end, both in `folder`."""
    from streamppo.config import file as configfile
    from streamppo.learner.model import tiny

    model, endless = folder / "model", folder / "endless"
    tiny.make(configfile.load(config), model)
    without_end(model, endless)
    return model, endless


def without_end(model: Path, folder: Path) -> None:
    """Copy a model without its end-of-sequence tokens and with a context of `CONTEXT` tokens."""
    shutil.copytree(model, folder)
    none: dict[str, dict[str, object]] = {
        "generation_config.json": {"eos_token_id": None},
        "tokenizer_config.json": {"eos_token": None},
        "config.json": {"eos_token_id": None, "max_position_embeddings": CONTEXT},
    }
    for name, changed in none.items():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **changed}))


def main() -> None:
    """Plot the share of completions that are at least as long, by length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    with plots.axes(options.plot, 1) as (axis,):
        for shape in SHAPES:
            drawn = sorted(draw(shape, number, 0) for number in range(DRAWN))
            axis.loglog(drawn, [1 - place / DRAWN for place in range(DRAWN)], label=shape)
        axis.set(xlabel="tokens", ylabel="share that is as long or longer")
        axis.legend()


if __name__ == "__main__":
    main()
