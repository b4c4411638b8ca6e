"""The median time of one program and of one score in each sandbox of this machine, compared with the bare interpreter.

    python benchmarks/cost/sandbox.py --json out.json

The program is empty, so that this is the cost of start and end. A score is that of a short program with one test: of
its output, or of code, where checker and program alternate. The kinds alternate: other work on the machine affects all
of them. Where this process may make a cgroup of version 2, the CPU time of all processes is measured too.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine
from streamppo.tasks.scorers import cgroup
from streamppo.tasks.scorers.bubblewrap import Bubblewrap
from streamppo.tasks.scorers.capture import RunLimits
from streamppo.tasks.scorers.code import CodeTests, Test
from streamppo.tasks.scorers.sandbox import Local, Sandbox
from streamppo.types import ScoredText

PROGRAM = (
    "import sys\ndef double(x):\n    return 2 * x\nif line := sys.stdin.readline():\n    print(double(int(line)))\n"
)
PRINTED: Test = {"input": "21", "output": "42"}
CODE: Test = "assert double(21) == 42"
SANDBOXES = {
    "Local": "streamppo.tasks.scorers.sandbox:Local",
    "Bubblewrap": "streamppo.tasks.scorers.bubblewrap:Bubblewrap",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = {"python": _bare, "Local": _in(Local()), "Bubblewrap": _in(Bubblewrap())}
    for name, sandbox in SANDBOXES.items():
        kinds |= {
            f"score of a print, {name}": _score(sandbox, PRINTED),
            f"score of code, {name}": _score(sandbox, CODE),
        }
    wall_ms: dict[str, list[float]] = {name: [] for name in kinds}
    cpu_ms: dict[str, list[float]] = {name: [] for name in kinds}
    with _cpu() as cpu_s:
        for _ in range(options.runs):
            for name, run in kinds.items():
                begin, before = time.perf_counter(), cpu_s()
                run()
                wall_ms[name].append((time.perf_counter() - begin) * 1e3)
                cpu_ms[name].append((cpu_s() - before) * 1e3)
    result = {
        "machine": machine(),
        "runs": options.runs,
        "median_ms": {name: round(statistics.median(times)) for name, times in wall_ms.items()},
        "least_ms": {name: round(min(times)) for name, times in wall_ms.items()},
        "median_cpu_ms": {name: round(statistics.median(times)) for name, times in cpu_ms.items()},
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def _cpu() -> Generator[Callable[[], float]]:
    """Count the CPU seconds of this process and all below it in a cgroup of their own; 0 where none can be made."""
    if (own := _group()) is None:
        yield lambda: 0.0
        return
    try:
        yield lambda: int((own / "cpu.stat").read_text().split()[1]) / 1e6
    finally:
        (own.parent / "cgroup.procs").write_text("0")
        own.rmdir()


def _group() -> Path | None:
    for level in cgroup.levels(cgroup.PROCESS_GROUP.read_text(), cgroup.MOUNTS.read_text()):
        with suppress(OSError):
            own = level / f"benchmark-{os.getpid()}"
            own.mkdir()
            (own / "cgroup.procs").write_text("0")
            return own
    return None


def _bare() -> None:
    subprocess.run([sys.executable, "-I", "-c", ""], check=True)


def _score(sandbox: str, test: Test) -> Callable[[], None]:
    reward = CodeTests(sandbox, test_timeout_s=60.0, all_timeout_s=60.0)
    text = ScoredText(prompt="", completion=PROGRAM, finish="stop", num_tokens=1)

    def run() -> None:
        scored = reward(text, [test])
        assert scored.score == 1.0, scored.explanation

    return run


def _in(sandbox: Sandbox) -> Callable[[], None]:
    def run() -> None:
        ran = asyncio.run(sandbox.run("", "", RunLimits(timeout_s=60.0)))
        assert ran.exit_code == 0, ran.stderr

    return run


if __name__ == "__main__":
    main()
