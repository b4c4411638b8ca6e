"""`streamppo bench`: runs the repository's quick benchmarks, and compares them with an earlier result.

Every part is a script of benchmarks/ in a separate process. Each of `rounds` rounds runs all parts. Numbers are costs,
so lower is better. Reference work before each part measures the machine's speed, and an earlier result is scaled to the
present speed.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamppo import durable
from streamppo.commands.console import console, echo, table
from streamppo.errors import RunError

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
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


class BenchFile(msgspec.Struct):
    """The JSON of a script: costs by name, and the machine with versions and commit."""

    machine: dict[str, object]
    costs: dict[str, float]


class BenchResult(msgspec.Struct):
    """Costs by name, and milliseconds of the reference work, with a value for every measurement."""

    machine: dict[str, object]
    reference_ms: list[float]
    costs: dict[str, list[float]]


def bench(parts: Sequence[Part], rounds: int, to: Path | None, earlier: Path | None) -> int:
    """Measure `parts`, print a table, write it to `to`. Returns 1 if a cost is slower. Raises `RunError`."""
    if not SCRIPTS.is_dir():
        raise RunError(
            "streamppo bench needs the repository, whose folder benchmarks/ is in no installed package: "
            "clone it, `pip install -e .` there, and try again"
        )
    if to:
        durable.refuse_output(to, RunError)
    then = read(earlier) if earlier else None
    begin = time.perf_counter()
    now = measure(parts, rounds)
    _print_table(now, then)
    echo("", f"{', '.join(f'{name} {value}' for name, value in _flat(now.machine).items())}")
    echo(f"median and range of {rounds} rounds; {time.perf_counter() - begin:.0f} s")
    if to:
        durable.write_output(to, msgspec.json.format(msgspec.json.encode(now), indent=1) + b"\n", RunError)
    return 1 if then and "slower" in changes(now, then).values() else 0


def measure(parts: Sequence[Part], rounds: int) -> BenchResult:
    """Run every part once in each round. Raises `RunError` with the output of a part that fails."""
    result = BenchResult({}, [], {})
    for _ in range(rounds):
        for part in parts:
            result.reference_ms.append(_reference_ms())
            output = _run(part)
            result.machine = output.machine
            for name, cost in output.costs.items():
                result.costs.setdefault(name, []).append(cost)
    return result


def read(path: Path) -> BenchResult:
    """Read an earlier result. Raises `RunError` if `path` has none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{path}: no result of streamppo bench --json: {error}") from None


def changes(now: BenchResult, then: BenchResult) -> dict[str, str]:
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


def pace(now: BenchResult, then: BenchResult) -> float:
    """Return the time of the reference work divided by the earlier time: 2 on a machine of half the speed."""
    return statistics.median(now.reference_ms) / statistics.median(then.reference_ms)


def _run(part: Part) -> BenchFile:
    script, *arguments = part
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(SCRIPTS / script), *arguments, "--json", str(out)]
        done = subprocess.run(
            command, cwd=SCRIPTS.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            raise RunError(f"{' '.join(part)} ended with {done.returncode}:\n{done.stdout[-QUOTED:]}")
        return msgspec.json.decode(out.read_bytes(), type=BenchFile)


def _reference_ms() -> float:
    begin = time.process_time()
    sum(number * number % 7 for number in range(REFERENCE))
    return 1e3 * (time.process_time() - begin)


def _print_table(now: BenchResult, then: BenchResult | None) -> None:
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
        echo("", f"earlier medians are multiplied by {speed:.2f}, the ratio of the times of the reference work")
        if missing := sorted(then.costs.keys() - now.costs.keys()):
            echo(f"not measured now: {', '.join(missing)}")


def _flat(machine: dict[str, object]) -> dict[str, object]:
    versions = machine.get("versions")
    flat = {name: value for name, value in machine.items() if name != "versions"}
    return flat | ({str(name): version for name, version in versions.items()} if isinstance(versions, dict) else {})
