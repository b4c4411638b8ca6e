"""A shard's journal: the trajectories that were delivered to it and not dropped yet.

runs/NAME/shards/0.sqlite      one row for each trajectory, by its identity

A superfluous row does no harm, so a live process of the shard and a process that was marked dead may both write here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.process import phase
from streamppo.queue.store.database import Database, checked_row
from streamppo.types import Identity, Trajectory

FORMAT = 1
TABLES = """
create table if not exists bodies (
    prompt int, sample int, attempt int, segment int, row blob, checksum int,
    primary key (prompt, sample, attempt, segment)
) strict, without rowid;
"""
ONE = "prompt = ? and sample = ? and attempt = ? and segment = ?"


class TrajectoryStore(Database):
    """The journal of shard `number` of the run in the folder `run`; several threads may use it concurrently."""

    def __init__(self, run: Path, number: int) -> None:
        file = path(run, number)
        with durable.naming(file.parent, JournalError):
            durable.folder(file.parent)
        super().__init__(file, TABLES, FORMAT)
        self._lock = Lock()

    @phase("journal")
    def write(self, encoded: Mapping[Identity, bytes]) -> None:
        """Add encoded trajectories, in one transaction; existing rows are kept."""
        rows = [(*_key(identity), *checked_row(body)) for identity, body in encoded.items()]
        with self._lock, self._transaction() as db:
            db.executemany("insert or ignore into bodies values (?, ?, ?, ?, ?, ?)", rows)

    def read(self, identities: Sequence[Identity]) -> list[Trajectory]:
        """Read the trajectories of `identities`, in order. Raises `JournalError` if one is missing or damaged."""
        with self._lock:
            return [self._read(identity) for identity in identities]

    def drop(self, identities: Iterable[Identity], first_prompt: int) -> None:
        """Delete these trajectories, and all trajectories of prompts before `first_prompt`; ignore missing ones."""
        with self._lock, self._transaction() as db:
            db.executemany(f"delete from bodies where {ONE}", [_key(identity) for identity in identities])
            db.execute("delete from bodies where prompt < ?", (first_prompt,))

    def all(self, together: int) -> Iterator[dict[Identity, bytes]]:
        """Yield all encoded trajectories, `together` at a time. Raises `JournalError` if one is damaged."""
        with self._errors_named():
            cursor = self._db.execute("select row, checksum from bodies")
            while rows := cursor.fetchmany(together):
                yield {self._decode("bodies", row, checksum, Trajectory).identity: row for row, checksum in rows}

    def _read(self, identity: Identity) -> Trajectory:
        query = f"select row, checksum from bodies where {ONE}"
        trajectories = self._rows("bodies", query, Trajectory, *_key(identity))
        if not trajectories:
            raise JournalError(f"{self.path}: the queue has the record of {identity}, and its tokens are missing here")
        return trajectories[0]


def path(run: Path, number: int) -> Path:
    """The file of shard `number`'s journal."""
    return run / "shards" / f"{number}.sqlite"


def _key(identity: Identity) -> tuple[int, int, int, int]:
    return identity.prompt, identity.sample, identity.attempt, identity.segment
