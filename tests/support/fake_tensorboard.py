"""A fake package `tensorboard` for a tracker's process: it fails as a test plans, and records its input."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = """
import json, os, time

def do(where):
    plan = {plan!r}
    if plan.get(where) == "hang":
        time.sleep(3600)
    if plan.get(where) == "raise":
        raise ConnectionError("no server\\nat 10.0.0.1")
    if plan.get(where) == "die":
        os._exit(3)

class Fields:
    def __init__(self, **fields):
        self.__dict__.update(fields)

class Summary(Fields):
    Value = Fields

Event = SummaryMetadata = Fields

class EventFileWriter:
    def __init__(self, folder):
        self.told = os.path.join(os.path.dirname(folder), "told.jsonl")
        do("open")

    def add_event(self, event):
        do("add")
        with open(self.told, "a") as file:
            for one in event.summary.value:
                about = one.metadata.summary_description if one.metadata else None
                file.write(json.dumps([one.tag, one.simple_value, event.step, event.wall_time, about]) + "\\n")

    def flush(self):
        do("flush")

    def close(self):
        do("close")
        with open(self.told, "a") as file:
            file.write(json.dumps("closed") + "\\n")

do("import")
"""
MODULES = ("compat.proto.event_pb2", "compat.proto.summary_pb2", "summary.writer.event_file_writer")
IMPATIENT = """
import faulthandler
wait = faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda seconds, exit: wait(seconds / 60, exit=exit)
"""
"""Makes a process's faulthandler timeouts 60 times shorter."""


def install(place: Path, plan: Mapping[str, str], *, impatient: bool = False) -> dict[str, str]:
    """Write the package to `place`; return the environment in which it is imported before any other."""
    package = place / "tensorboard"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(SOURCE.replace("{plan!r}", repr(dict(plan))))
    for module in MODULES:
        path = package / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from tensorboard import *")
    if impatient:
        (place / "sitecustomize.py").write_text(IMPATIENT)
    paths = [str(place), str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def told(run: Path) -> list[Any]:
    """All records of the package about a run, in order."""
    path = run / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
