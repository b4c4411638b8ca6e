"""Train on random combinations of models, templates and data rows: each must train, or be refused with a remedy.

    python benchmarks/faults/folders.py --draws 200 --whole 20 --seed 1 --json folders.json

A draw is a family, a kind of tokenizer, a chat template, tied embeddings or not, a type and a layout of the weights'
files, a format of the rows, an environment of two turns or none; about a third have a fault. A draw is refused by
`check` in a sentence that names the remedy, or trains for three updates and agrees with transformers: on the tokens of
prompts and observations, on the engine's log-probs at the first and at the last version, on the learner's log-probs,
and on the exported folder. Any other outcome is a failure. Most draws are played in this process; the first `--whole`
draws run `streamppo check` and `streamppo run`.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine, table

Row = dict[str, Any]


def main() -> None:
    """Play the draws, print the failed ones and the counts, and write all results to `--json`."""
    options = _options()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    begin = time.perf_counter()
    rows = play(options.seed, range(options.first, options.first + options.draws), options.whole)
    for row in rows:
        if row["wrong"]:
            print(f"{row['draw']}\n    " + "\n    ".join(row["wrong"]))
    counts = summary(rows)
    print(table([counts]))
    if options.json:
        seconds = round(time.perf_counter() - begin, 1)
        found = {"machine": machine(), "seed": options.seed, "seconds": seconds, "counts": counts, "draws": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if counts["failed"] else 0)


def play(seed: int, numbers: Sequence[int], whole: int) -> list[Row]:
    """Play draws; the first `whole` of them with the commands, in separate processes."""
    draws, players, runs, case = map(import_module, ("folder_draw", "folder_play", "folder_run", "learner_case"))
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for count, number in enumerate(numbers):
            if count == whole:
                # The process group of one rank begins after the draws that start Ray.
                stack.enter_context(case.group(0, 1, Path(folder) / "store"))
            made = draws.draw(seed, number, whole=count < whole)
            at = Path(folder) / str(number)
            row = (runs.run if made.whole else players.play)(made, at).row()
            # Messages without the campaign's temporary path.
            rows.append(json.loads(json.dumps(row).replace(f"{folder}/", "")))
            print(f"{len(rows)}: {rows[-1]['outcome']}, {rows[-1]['seconds']} s", file=sys.stderr)
    return rows


def summary(rows: Sequence[Row]) -> dict[str, int]:
    """Count the draws by outcome."""
    found = Counter(row["outcome"] for row in rows)
    two_turns = sum(row["two_turns"] for row in rows)
    named = {name: found[name] for name in ("passes", "refused", "failed")}
    return {"draws": len(rows), **named, "trajectories of two turns": two_turns}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--whole", type=int, default=20, help="so many of them as whole runs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
