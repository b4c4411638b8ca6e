"""What the benchmarks share: a real run in a process of its own, and the machine that it ran on."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """What a run left behind: summary.json, and the lines of metrics.jsonl that are updates."""

    summary: dict[str, Any]
    updates: list[dict[str, Any]]


def run(config: Path, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """`streamppo run CONFIG OVERRIDES` in a folder of its own. Ends the benchmark if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "streamppo", "run", str(config), "--runs", folder, *overrides]
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
        (made,) = Path(folder).iterdir()
        rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((made / "summary.json").read_text())
    return Run(summary, [row for row in rows if "update" in row])


def machine() -> dict[str, Any]:
    """Cores, processor, and the versions of what matters."""
    packages = ("streamppo", "torch", "ray", "transformers")
    versions = {name: metadata.version(name) for name in packages}
    return {"cores": os.cpu_count(), "cpu": _cpu(), "python": platform.python_version(), "versions": versions}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
