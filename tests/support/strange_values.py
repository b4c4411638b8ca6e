"""Values that no run writes, in files that are whole: sizes, checksums and hashes fit, as a stranger can make them."""

import hashlib
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import msgspec
import numpy as np

from streamppo.queue.store import zarr_zip
from streamppo.telemetry import metrics_file

Random: TypeAlias = random.Random
NUMBERS = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**53, 10**15, 2**62, 2**63 - 1, -(2**63))
TEXTS = ("", "x" * 100_000, "\x1b]0;x\x07", "../../x", "9" * 30, "rollout-0")
FRACTIONS = (float("nan"), float("inf"), float("-inf"), -1e308, 0.5)
TABLES = {"state": "value", "slots": "row", "leases": "row", "versions": "row", "configs": "row", "ended": "row"}
SHARE, FEW = 0.15, 0.05
"""Values that are changed, of a row of the journal and of a line."""


def strange(value: Any, rng: Random, share: float) -> Any:
    """`value` with a `share` of its parts replaced by others, mostly of the same type."""
    match value:
        case dict():
            return {
                strange(key, rng, share / 4): strange(item, rng, share)
                for key, item in value.items()
                if rng.random() > share / 8
            }
        case list():
            items = [strange(item, rng, share) for item in value]
            return items if rng.random() > share / 2 else rng.choice([items[:-1], items * 2, []])
        case _ if rng.random() > share:
            return value
        case bool():
            return not value
        case int():
            return rng.choice(NUMBERS)
        case float():
            return rng.choice(FRACTIONS)
        case str():
            return rng.choice(TEXTS)
        case bytes():
            return rng.choice([b"", value * 3, value[:-1], rng.randbytes(len(value))])
        case _:
            return rng.choice([1, "x", value])


def journal(run: Path, rng: Random) -> None:
    """Rows of every table, with checksums of their own, and some keys."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        for table, column in TABLES.items():
            for name, row in db.execute(f"select rowid_of, {column} from {_keyed(table)}").fetchall():
                if rng.random() < 0.4:
                    changed = msgspec.msgpack.encode(strange(msgspec.msgpack.decode(row), rng, SHARE))
                    where = f"update {table} set {column} = ?, checksum = ? where {_key(table)} = ?"
                    db.execute(where, (changed, crc32(changed), name))
            if table != "state" and rng.random() < 0.2:
                db.execute(f"update or ignore {table} set {_key(table)} = ?", (rng.choice(NUMBERS),))
        db.commit()


def _keyed(table: str) -> str:
    return f"(select *, {_key(table)} as rowid_of from {table})"


def _key(table: str) -> str:
    return {"state": "name", "slots": "number", "ended": "number"}.get(table, "version")


def archive(run: Path, rng: Random) -> None:
    """Columns and attributes of every batch; the journal has the hashes of these files."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        for version, row in db.execute("select version, row from versions").fetchall():
            file = run / "archive" / f"{version - 1:08d}.zarr.zip"
            if not file.is_file():
                continue
            before = hashlib.sha256(file.read_bytes()).hexdigest()
            with file.open("rb") as opened:
                columns, attributes = zarr_zip.unpack(opened)
            for name in rng.sample(sorted(columns), rng.randint(1, 2)):
                _change(columns, name, rng)
            told = json.loads(bytes(attributes))
            file.write_bytes(zarr_zip.pack(columns, strange(told, rng, SHARE) if rng.random() < 0.4 else told))
            after = row.replace(before.encode(), hashlib.sha256(file.read_bytes()).hexdigest().encode())
            db.execute("update versions set row = ?, checksum = ? where version = ?", (after, crc32(after), version))
        db.commit()


def _change(columns: "dict[str, Any]", name: str, rng: Random) -> None:
    column = columns[name].copy()
    match rng.choice(["value", "shorter", "longer", "type", "zeros", "gone"]):
        case "value" if column.size:
            wanted = FRACTIONS if column.dtype.kind == "f" else (-1, 0, 1, 5, np.iinfo(np.int32).max)
            if column.dtype.kind != "b":
                # -1e308 becomes -inf in float32.
                with np.errstate(over="ignore"):
                    column.flat[rng.randrange(column.size)] = rng.choice(wanted)
        case "shorter":
            column = column[:-1]
        case "longer":
            column = np.concatenate([column, column])
        case "type":
            column = np.nan_to_num(column).astype(rng.choice(["int64", "float32", "int32", "bool"]))
        case "zeros":
            column = np.zeros_like(column)
        case _:
            del columns[name]
            return
    columns[name] = np.ascontiguousarray(column)


def configuration(run: Path, rng: Random) -> None:
    """Numbers of the run's configuration."""
    lines = (run / "config.toml").read_text().splitlines()
    for place in rng.sample([at for at, line in enumerate(lines) if line.partition(" = ")[2][:1].isdigit()], 2):
        value = rng.choice(["1000000000000000", "0", "-1", "1e300", "9223372036854775807", "1"])
        lines[place] = f"{lines[place].partition(' = ')[0]} = {value}"
    (run / "config.toml").write_text("\n".join(lines) + "\n")


def metrics(run: Path, rng: Random) -> None:
    """Values of every line of metrics.jsonl."""
    file = run / metrics_file.METRICS
    lines = [strange(json.loads(line), rng, FEW) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


DRAWS: dict[str, Callable[[Path, Random], None]] = {
    "journal": journal,
    "archive": archive,
    "configuration": configuration,
    "metrics": metrics,
}


def far_row(run: Path, version: int) -> None:
    """The newest version in the journal, with its checksum."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        newest, row = db.execute("select version, row from versions order by version desc limit 1").fetchone()
        changed = msgspec.msgpack.encode({**msgspec.msgpack.decode(row), "version": version})
        where = "update versions set version = ?, row = ?, checksum = ? where version = ?"
        db.execute(where, (version, changed, crc32(changed), newest))
        db.commit()


def far_queue(run: Path, version: int) -> None:
    """The newest version of the journal, and the version of its queue."""
    far_row(run, version)
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        for name, row in db.execute("select name, value from state").fetchall():
            told = msgspec.msgpack.decode(row)
            if isinstance(told, dict) and "version" in told:
                changed = msgspec.msgpack.encode({**told, "version": version})
                db.execute("update state set value = ?, checksum = ? where name = ?", (changed, crc32(changed), name))
        db.commit()


def far_line(name: str) -> Callable[[Path, int], None]:
    """The last line of metrics.jsonl with a number `name`."""

    def change(run: Path, version: int) -> None:
        file = run / metrics_file.METRICS
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines += [{**next(line for line in reversed(lines) if name in line), name: version}]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def two_kinds(run: Path, version: int) -> None:
    """A line of an update that has the name of another kind of line."""
    file = run / metrics_file.METRICS
    first, *others = file.read_text().splitlines()
    changed = [json.dumps({**json.loads(line), "evaluation": version}) for line in others]
    file.write_text("\n".join([first, *changed]) + "\n")


FAR: dict[str, Callable[[Path, int], None]] = {
    "journal": far_row,
    "journal and queue": far_queue,
    **{name: far_line(name) for name in ("update", "evaluation", "lag_max")},
    "an update that is an evaluation too": two_kinds,
}
"""Ways to put a version far beyond all others into a run."""
