"""The quick benchmarks in one table, and a comparison with an earlier result. Less than five minutes on two cores.

    python benchmarks/cost/quick.py --json now.json
    python benchmarks/cost/quick.py --json now.json --compare before.json    # exit code 1 if a cost has risen

Every part is a script in a separate process. Each of `--rounds` rounds runs all parts. Numbers are costs, so lower is
better. Reference work before each part measures the machine's speed, and an earlier result is scaled to the present
speed.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamppo.commands.console import console, table

SCRIPTS = Path(__file__).parents[1]
Part = tuple[str, ...]
PARTS: tuple[Part, ...] = (
    ("cost/engine.py", "--no-peer", "--rounds", "1"),
    ("cost/queue_load.py", "--engines", "16", "1024", "--tokens", "100", "--seconds", "2"),
    ("cost/push.py", "--no-store", "--gigabytes", "0.1", "--lr"),
    ("cost/cost.py", "--updates", "30", "--repeat", "1"),
)
MARGIN = 1.1
"""Two medians count as equal if their ratio is below this number."""
REFERENCE = 1_000_000
QUOTED = 2000


class PartResult(msgspec.Struct):
    """The JSON of a script: costs by name, and the machine with versions and commit."""

    machine: dict[str, object]
    costs: dict[str, float]


class QuickResult(msgspec.Struct):
    """Costs by name, and milliseconds of the reference work, with a value for every measurement."""

    machine: dict[str, object]
    reference_ms: list[float]
    costs: dict[str, list[float]]


def measure(parts: Sequence[Part], rounds: int) -> QuickResult:
    """Run every part once in each round. A part that fails ends the script with the part's output."""
    result = QuickResult({}, [], {})
    for _ in range(rounds):
        for part in parts:
            result.reference_ms.append(reference_ms())
            output = run(part)
            result.machine = output.machine
            for name, cost in output.costs.items():
                result.costs.setdefault(name, []).append(cost)
    return result


def changes(now: QuickResult, then: QuickResult) -> dict[str, str]:
    """Return "slower", "faster" or "equal" for each cost in both results.

    A cost is slower if the ratio of medians exceeds `MARGIN` and every value exceeds `pace` times every earlier value.
    """
    words: dict[str, str] = {}
    for name in now.costs.keys() & then.costs.keys():
        new, old = now.costs[name], [cost * pace(now, then) for cost in then.costs[name]]
        ratio = statistics.median(new) / statistics.median(old)
        slower = ratio > MARGIN and min(new) > max(old)
        faster = ratio < 1 / MARGIN and max(new) < min(old)
        words[name] = "slower" if slower else "faster" if faster else "equal"
    return words


def pace(now: QuickResult, then: QuickResult) -> float:
    """Return the time of the reference work divided by the earlier time: 2 on a machine of half the speed."""
    return statistics.median(now.reference_ms) / statistics.median(then.reference_ms)


def run(part: Part) -> PartResult:
    script, *arguments = part
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(SCRIPTS / script), *arguments, "--json", str(out)]
        done = subprocess.run(
            command, cwd=SCRIPTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(part)} ended with {done.returncode}:\n{done.stdout[-QUOTED:]}")
        return msgspec.json.decode(out.read_bytes(), type=PartResult)


def reference_ms() -> float:
    begin = time.process_time()
    sum(number * number % 7 for number in range(REFERENCE))
    return 1e3 * (time.process_time() - begin)


def show(now: QuickResult, then: QuickResult | None) -> None:
    columns = ["cost", "median", "smallest", "largest"]
    shown = table(*columns, *(["earlier median", "ratio", ""] if then else []))
    words, speed = (changes(now, then), pace(now, then)) if then else ({}, 1.0)
    for name, values in now.costs.items():
        cells = [name, *(f"{cost:.4g}" for cost in (statistics.median(values), min(values), max(values)))]
        if then and name in words:
            old = speed * statistics.median(then.costs[name])
            cells += [f"{old:.4g}", f"{statistics.median(values) / old:.2f}", words[name]]
        shown.add_row(*cells)
    console().print(shown)
    if then:
        print(f"\nearlier medians are multiplied by {speed:.2f}, the ratio of the times of the reference work")
        if missing := sorted(then.costs.keys() - now.costs.keys()):
            print(f"not measured now: {', '.join(missing)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--compare", type=Path, help="an earlier file of --json")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    then = msgspec.json.decode(options.compare.read_bytes(), type=QuickResult) if options.compare else None
    begin = time.perf_counter()
    now = measure(PARTS, options.rounds)
    show(now, then)
    print(f"\nmedian and range of {options.rounds} rounds; {time.perf_counter() - begin:.0f} s")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(now), indent=1) + b"\n")
    return 1 if then and "slower" in changes(now, then).values() else 0


if __name__ == "__main__":
    sys.exit(main())
