"""All measurements that need a GPU, in one command of at most ten minutes, for one H100 or H200.

    python -m benchmarks.gpu.gpu_day --json out.json

torch 2.11 or newer is required; without Ray, SGLang, flash-attn or pytest some parts are left out, with the reason in
the result. Every part is a separate process with a time limit; a part that fails, hangs or crashes does not stop the
others. The JSON is written after every part. On a CPU the same parts run with small sizes, as a rehearsal.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flash-attn-4", "ray", "sglang", "sglang-kernel", "pytest")


class Part(NamedTuple):
    """A function of benchmarks/gpu/gpu_parts.py, and its time limit in seconds."""

    name: str
    limit_s: float


PARTS = (
    Part("device", 40),
    Part("head", 60),
    Part("update", 90),
    Part("layers", 60),
    Part("push", 40),
    Part("end_to_end", 90),
    Part("tests", 130),
    Part("ray_run", 80),
    Part("sglang_run", 120),
    Part("compiled", 120),
)
"""The most important parts first: the last ones are left out if time is short."""


def main() -> None:
    options = parser().parse_args()
    chosen = [part for part in PARTS if part.name in options.parts]
    result = run(chosen, options.limit_s, options.json)
    print(json.dumps(result, indent=1))


def parser() -> argparse.ArgumentParser:
    names = [part.name for part in PARTS]
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="file for the results")
    made.add_argument("--parts", nargs="+", choices=names, default=names)
    made.add_argument("--limit-s", type=float, default=580.0, help="seconds that all parts may take together")
    return made


def run(parts: Sequence[Part], limit_s: float, path: Path | None) -> dict[str, object]:
    """Run `parts` one after another; write the results to `path` after each."""
    deadline = time.monotonic() + limit_s
    made: dict[str, object] = {}
    result = {"versions": versions(), "commit": commit(), "parts": made}
    for part in parts:
        begin = time.monotonic()
        limit = min(part.limit_s, deadline - begin)
        found = measured(part.name, limit) if limit > 1 else {"left_out": "no time was left"}
        made[part.name] = found | {"seconds": round(time.monotonic() - begin, 1)}
        if path is not None:
            path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measured(name: str, limit_s: float) -> dict[str, object]:
    """{"result": ...} of a part, or {"left_out": reason} or {"failed": reason}."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu.gpu_parts", name, str(out)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {"failed": f"not within {limit_s:.0f} s", "output": tail(log)}
            finally:
                end(process)
        if out.exists():
            return json.loads(out.read_text())
        return {"failed": f"exit code {code}", "output": tail(log)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and all its child processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-25:]


def versions() -> dict[str, str]:
    """The versions of the installed packages."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The measured commit; empty outside of a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    main()
