"""The median time of one program in each sandbox of this machine, compared with the bare interpreter.

    python benchmarks/cost/sandbox.py --json out.json

The program is empty, so that this is the cost of start and end. The kinds alternate: other work on the machine affects
all of them.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine
from streamppo.tasks.scorers.bubblewrap import Bubblewrap
from streamppo.tasks.scorers.capture import RunLimits
from streamppo.tasks.scorers.sandbox import Local, Sandbox


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = {"python": _bare, "Local": _in(Local()), "Bubblewrap": _in(Bubblewrap())}
    taken_ms: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.runs):
        for name, run in kinds.items():
            begin = time.perf_counter()
            run()
            taken_ms[name].append((time.perf_counter() - begin) * 1e3)
    medians = {name: round(statistics.median(times)) for name, times in taken_ms.items()}
    result = {"machine": machine(), "runs": options.runs, "median_ms": medians}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _bare() -> None:
    subprocess.run([sys.executable, "-I", "-c", ""], check=True)


def _in(sandbox: Sandbox) -> Callable[[], None]:
    def run() -> None:
        ran = asyncio.run(sandbox.run("", "", RunLimits(timeout_s=60.0)))
        assert ran.exit_code == 0, ran.stderr

    return run


if __name__ == "__main__":
    main()
