"""Changes of a run's records that `streamppo verify` is asked to find: each is planted in the copy of a run's folder.

A change of a batch or of a version has a depth: the file alone; with the journal's row and its checksum; or with every
later link of the chain too, which only an owner does who wants to deceive.
"""

import hashlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import msgspec
import numpy as np
from msgspec import structs
from safetensors.torch import load_file, save_file

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.checkpoint import manifest
from streamppo.queue.rules.records import EndedAttempt, PublishedVersion, with_link
from streamppo.queue.store import archive, zarr_zip
from streamppo.queue.store.columns import batch_columns
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.types import Batch, Identity, TokenRecord, floats, ints

Depth = Literal["file", "journal", "chain"]
Found = Literal["records", "again", "digest"]
Row = dict[str, Any]


class Manipulation(NamedTuple):
    """A change, and what finds it: the records alone, updates that are replayed, or a digest from elsewhere."""

    plant: Callable[[Path, random.Random], None]
    found: Found


# --- batches -------------------------------------------------------------------------------------------------


def rewrite(run: Path, version: int, change: Callable[[Batch], Batch], depth: Depth) -> None:
    """Write the batch of `version` again, with a `change`."""
    found = archive.open(run)
    batch, learned = found.batch_and_record(version)
    record = TokenRecord(**{name: np.concatenate(parts).tobytes() for name, parts in learned.items()})
    changed = change(batch)
    # The learner's numbers are those of other tokens then.
    same = [one.num_tokens for one in changed.trajectories] == [one.num_tokens for one in batch.trajectories]
    columns, attributes = batch_columns(changed, record if same else TokenRecord())
    content = zarr_zip.pack(columns, msgspec.to_builtins(attributes))
    found.path(version).write_bytes(content)
    if depth != "file":
        sha256 = hashlib.sha256(content).hexdigest()
        edit_version(run, version + 1, lambda made: with_file(made, sha256), linked=depth == "chain")


def with_file(made: PublishedVersion, sha256: str) -> PublishedVersion:
    assert made.archived is not None
    return structs.replace(made, archived=structs.replace(made.archived, files=(sha256,)))


def of_a_row(change: Callable[[Any, random.Random], Any], depth: Depth) -> Callable[[Path, random.Random], None]:
    """Change one trajectory of one batch."""

    def plant(run: Path, chance: random.Random) -> None:
        place = chance.randrange(16)

        def changed(batch: Batch) -> Batch:
            rows = [*batch.trajectories]
            rows[place] = change(rows[place], chance)
            return structs.replace(batch, trajectories=tuple(rows))

        rewrite(run, chance.randrange(6), changed, depth)

    return plant


def reward(one: Any, chance: random.Random) -> Any:
    return structs.replace(one, reward=one.reward + chance.choice((-1.0, 1.0)))


def token(one: Any, chance: random.Random) -> Any:
    tokens = ints(one.tokens).copy()
    tokens[chance.randrange(len(tokens))] += 1
    return structs.replace(one, tokens=tokens.tobytes())


def logprob(one: Any, chance: random.Random) -> Any:
    numbers = floats(one.logprobs).copy()
    numbers[chance.randrange(len(numbers))] -= 0.5
    return structs.replace(one, logprobs=numbers.tobytes())


def version_of_a_token(one: Any, chance: random.Random) -> Any:
    versions = ints(one.versions).copy()
    versions[chance.randrange(len(versions))] += 1
    return structs.replace(one, versions=versions.tobytes())


def rows_in_another_order(run: Path, chance: random.Random, depth: Depth) -> None:
    def changed(batch: Batch) -> Batch:
        rows = [*batch.trajectories]
        first, second = chance.sample(range(0, len(rows), 4), 2)
        rows[first], rows[second] = rows[second], rows[first]
        return structs.replace(batch, trajectories=tuple(rows))

    rewrite(run, chance.randrange(6), changed, depth)


def row_of_another_batch(run: Path, chance: random.Random, depth: Depth) -> None:
    """A row of an earlier batch in place of one of a later batch."""
    first, second = sorted(chance.sample(range(6), 2))
    row = archive.open(run).batch(first).trajectories[chance.randrange(16)]
    rewrite(run, second, lambda batch: structs.replace(batch, trajectories=(row, *batch.trajectories[1:])), depth)


def batch_twice(run: Path, chance: random.Random, depth: Depth) -> None:
    first, second = sorted(chance.sample(range(6), 2))
    rows = archive.open(run).batch(first).trajectories
    rewrite(run, second, lambda batch: structs.replace(batch, trajectories=rows), depth)


def batch_copied(run: Path, chance: random.Random) -> None:
    first, second = chance.sample(range(6), 2)
    found = archive.open(run)
    shutil.copy(found.path(first), found.path(second))


def batch_removed(run: Path, chance: random.Random) -> None:
    archive.open(run).path(chance.randrange(6)).unlink()


def batches_exchanged(run: Path, chance: random.Random) -> None:
    """Two files change places, and so do their checksums in the journal."""
    first, second = chance.sample(range(6), 2)
    found = archive.open(run)
    one, other = found.path(first).read_bytes(), found.path(second).read_bytes()
    found.path(first).write_bytes(other)
    found.path(second).write_bytes(one)
    for version, content in ((first, other), (second, one)):
        sha256 = hashlib.sha256(content).hexdigest()
        edit_version(run, version + 1, lambda made, sha256=sha256: with_file(made, sha256), linked=True)


# --- the journal ---------------------------------------------------------------------------------------------


def edit(run: Path, change: Callable[[sqlite3.Connection], object]) -> None:
    with closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as db:
        change(db)


def put_row(db: sqlite3.Connection, table: str, key: int, row: bytes) -> None:
    db.execute(f"update {table} set row = ?, checksum = ? where version = ?", (row, crc32(row), key))


def edit_version(
    run: Path, version: int, change: Callable[[PublishedVersion], PublishedVersion], *, linked: bool
) -> None:
    """Change the record of a version with its checksum; `linked`: and all links from there on."""
    with closing(Journal.open_run(run)) as journal:
        made, configs = journal.versions(), journal.configs()
    made[version] = change(made[version])
    if linked:
        for number in sorted(made):
            before = made[number - 1].link if number else ""
            made[number] = with_link(made[number], configs, before)

    def write(db: sqlite3.Connection) -> None:
        for number, one in made.items():
            put_row(db, "versions", number, msgspec.msgpack.encode(one))

    edit(run, write)


def digest_of_a_version(run: Path, chance: random.Random, *, linked: bool, versions: tuple[int, ...]) -> None:
    other = f"{chance.randrange(2**256):064x}"
    edit_version(run, chance.choice(versions), lambda made: structs.replace(made, digest=other), linked=linked)


def damaged_row(run: Path, chance: random.Random) -> None:
    version = chance.randrange(7)
    edit(run, lambda db: db.execute("update versions set row = x'80' where version = ?", (version,)))


def version_removed(run: Path, chance: random.Random) -> None:
    version = chance.randrange(7)
    edit(run, lambda db: db.execute("delete from versions where version = ?", (version,)))


def configuration_of_the_journal(run: Path, chance: random.Random) -> None:
    def write(db: sqlite3.Connection) -> None:
        ((row,),) = db.execute("select row from configs").fetchall()
        config = msgspec.msgpack.decode(row, type=Config)
        learner = structs.replace(config.learner, lr=config.learner.lr * chance.uniform(1.1, 9))
        put_row(db, "configs", 0, msgspec.msgpack.encode(structs.replace(config, learner=learner)))

    edit(run, write)


def failure_hidden(run: Path, chance: random.Random) -> None:
    """An attempt that never was."""
    one = EndedAttempt(number=0, identity=Identity(task="t", prompt=0, sample=0), state="failed", reason="none")
    row = msgspec.msgpack.encode(one)
    edit(run, lambda db: db.execute("insert into ended values (0, 9, 0, ?, ?)", (row, crc32(row))))


# --- weights -------------------------------------------------------------------------------------------------


def checkpoints(run: Path, chance: random.Random) -> tuple[Path, Path]:
    first, second = chance.sample(manifest.complete(run / "checkpoints"), 2)
    return first, second


def weights_exchanged(run: Path, chance: random.Random, *, sealed: bool) -> None:
    """The files of a checkpoint are those of another one; `sealed`: and its manifest has their SHA-256."""
    first, second = checkpoints(run, chance)
    found = manifest.read(first)
    for path in second.glob("*.distcp"):
        shutil.copy(path, first / path.name)
    shutil.copy(second / ".metadata", first / ".metadata")
    if sealed:
        manifest.write(first, found.state, manifest.read(second).files)


def checkpoint_renamed(run: Path, chance: random.Random) -> None:
    first, second = checkpoints(run, chance)
    shutil.rmtree(first)
    shutil.copytree(second, first)
    found = manifest.read(second)
    if chance.random() < 0.5:
        state = structs.replace(found.state, version=int(first.name))
        manifest.write(first, state, found.files)


def manifest_changed(run: Path, chance: random.Random, *, sealed: bool) -> None:
    path, _ = checkpoints(run, chance)
    found = manifest.read(path)
    if sealed:
        manifest.write(path, structs.replace(found.state, digest=f"{chance.randrange(2**256):064x}"), found.files)
    else:
        text = (path / manifest.MANIFEST).read_text()
        (path / manifest.MANIFEST).write_text(text.replace('"beta": 0', '"beta": 1'))


def final_changed(run: Path, chance: random.Random) -> None:
    (path,) = (run / "final").glob("*.safetensors")
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, path, {"format": "pt"})


# --- the files beside them -----------------------------------------------------------------------------------


def edit_lines(run: Path, change: Callable[[list[Row]], object]) -> None:
    path = run / metrics_file.METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def an_update(lines: list[Row], chance: random.Random) -> int:
    return chance.choice([place for place, line in enumerate(lines) if "update" in line])


def number_of_a_line(*names: str) -> Callable[[Path, random.Random], None]:
    def plant(run: Path, chance: random.Random) -> None:
        def change(lines: list[Row]) -> None:
            line, name = lines[an_update(lines, chance)], chance.choice(names)
            line[name] = {"9": 1} if name == "lag_histogram" else line[name] * 1.01 + 0.01

        edit_lines(run, change)

    return plant


def line_removed(run: Path, chance: random.Random) -> None:
    edit_lines(run, lambda lines: lines.pop(an_update(lines, chance)))


def line_doubled(run: Path, chance: random.Random) -> None:
    def change(lines: list[Row]) -> None:
        place = an_update(lines, chance)
        lines.insert(place, lines[place])

    edit_lines(run, change)


def lines_moved(run: Path, chance: random.Random) -> None:
    def change(lines: list[Row]) -> None:
        first, second = chance.sample([place for place, line in enumerate(lines) if "update" in line], 2)
        lines[first], lines[second] = lines[second], lines[first]

    edit_lines(run, change)


def line_damaged(run: Path, chance: random.Random) -> None:
    path = run / metrics_file.METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    place = chance.randrange(len(lines))
    lines[place] = lines[place][: len(lines[place]) // 2] + b"\n"
    path.write_bytes(b"".join(lines))


def summary_changed(run: Path, chance: random.Random) -> None:
    path = run / "summary.json"
    content = json.loads(path.read_text())
    name = chance.choice(("outcome", "updates", "tokens_trained", "trajectories", "wall_s", "checksum"))
    content[name] = "another" if isinstance(content[name], str) else content[name] + 1
    path.write_text(json.dumps(content))


def configuration_changed(run: Path, chance: random.Random) -> None:
    change = chance.choice(("learner.lr=0.5", "queue.batch_size=32", "algorithm.entropy=0.3", "seed=8"))
    config = configfile.change(configfile.load(run / configfile.CONFIG), [change])
    configfile.save(config, run)


def inputs_changed(run: Path, chance: random.Random) -> None:
    path = run / "inputs.json"
    text = path.read_text()
    known = [part for part in text.split('"') if len(part) == 64]
    if known and chance.random() < 0.5:
        path.write_text(text.replace(chance.choice(known), f"{chance.randrange(2**256):064x}"))
    else:
        (model,) = (run / "model").glob("config.json")
        model.write_text(model.read_text() + " ")


def deep(change: Callable[..., None], **options: object) -> Callable[[Path, random.Random], None]:
    return lambda run, chance: change(run, chance, **options)


ROWS = {"reward": reward, "token": token, "log-prob": logprob, "token's version": version_of_a_token}
MANIPULATIONS = {
    **{
        f"a {name}, {depth}": Manipulation(of_a_row(change, depth), "records")
        for name, change in ROWS.items()
        for depth in ("file", "journal")
    },
    # The lines have the mean reward, and the lags of tokens.
    "a reward, chain": Manipulation(of_a_row(reward, "chain"), "records"),
    "a token's version, chain": Manipulation(of_a_row(version_of_a_token, "chain"), "records"),
    "a token, chain": Manipulation(of_a_row(token, "chain"), "again"),
    "a log-prob, chain": Manipulation(of_a_row(logprob, "chain"), "again"),
    "rows in another order, journal": Manipulation(deep(rows_in_another_order, depth="journal"), "records"),
    "rows in another order, chain": Manipulation(deep(rows_in_another_order, depth="chain"), "again"),
    **{
        f"{name}, {depth}": Manipulation(deep(change, depth=depth), "records")
        for name, change in (("a row of another batch", row_of_another_batch), ("a batch twice", batch_twice))
        for depth in ("file", "journal", "chain")
    },
    "a batch copied": Manipulation(batch_copied, "records"),
    "a batch removed": Manipulation(batch_removed, "records"),
    "batches exchanged, chain": Manipulation(batches_exchanged, "records"),
    "a version's digest, journal": Manipulation(
        deep(digest_of_a_version, linked=False, versions=(0, 1, 2, 3, 4, 5, 6)), "records"
    ),
    "a checkpoint's digest, chain": Manipulation(deep(digest_of_a_version, linked=True, versions=(2, 4, 6)), "records"),
    "a version's digest, chain": Manipulation(deep(digest_of_a_version, linked=True, versions=(1, 3, 5)), "again"),
    "a damaged row": Manipulation(damaged_row, "records"),
    "a version removed": Manipulation(version_removed, "records"),
    "the journal's configuration": Manipulation(configuration_of_the_journal, "records"),
    "an ending of an attempt": Manipulation(failure_hidden, "digest"),
    "weights exchanged": Manipulation(deep(weights_exchanged, sealed=False), "records"),
    "weights exchanged, sealed": Manipulation(deep(weights_exchanged, sealed=True), "records"),
    "a checkpoint renamed": Manipulation(checkpoint_renamed, "records"),
    "a manifest": Manipulation(deep(manifest_changed, sealed=False), "records"),
    "a manifest, sealed": Manipulation(deep(manifest_changed, sealed=True), "records"),
    "the final model": Manipulation(final_changed, "records"),
    "a line's reward or lag": Manipulation(number_of_a_line("reward", "length", "tokens", "lag_histogram"), "records"),
    "a line's loss": Manipulation(number_of_a_line("policy_loss", "entropy", "grad_norm", "ess"), "again"),
    "a line's times": Manipulation(number_of_a_line("score_s", "train_s", "push_mib"), "digest"),
    "a line removed": Manipulation(line_removed, "records"),
    "a line doubled": Manipulation(line_doubled, "records"),
    "lines moved": Manipulation(lines_moved, "records"),
    "a line damaged": Manipulation(line_damaged, "records"),
    "the summary": Manipulation(summary_changed, "records"),
    "the configuration": Manipulation(configuration_changed, "records"),
    "the inputs": Manipulation(inputs_changed, "records"),
}
"""All of them by name. A copy of a run of six updates of 16 rows with checkpoints of 2, 4 and 6 is changed."""
