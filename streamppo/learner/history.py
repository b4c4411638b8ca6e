"""The versions of a run as its journal has them, for those that load one of them or make it again. Needs no torch.

configs    the configuration of every update: an update that is made again is made as it was
digests    the weights of every version: a checkpoint with others is one of another run, whatever its name says
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from streamppo.config.change import as_present
from streamppo.config.sections import Config
from streamppo.queue import continuation
from streamppo.queue.journal import Journal
from streamppo.queue.records import Made

ANY = ""
"""In the place of a digest: the version may have been made again with weights near the first ones."""


class History(msgspec.Struct, frozen=True):
    """`configs` by the version from which each holds, `digests` of versions; without any, nothing is compared."""

    configs: dict[int, Config]
    digests: dict[int, str] = {}

    def at(self, version: int) -> Config:
        """The configuration of the update that starts at `version`.

        Example: with configurations of versions 0 and 50, that of 0 for 49 and that of 50 for 50 and 51.
        """
        return self.configs[max((one for one in self.configs if one <= version), default=min(self.configs))]

    def refusal(self, version: int, digest: str) -> str:
        """Say why weights with this digest are not those of `version`; empty if they are."""
        if not self.digests:
            return ""
        if (known := self.digests.get(version)) is None:
            return f"of another run: the journal knows no version {version}"
        if known not in (ANY, digest):
            return (
                f"of another run: its weights are {digest[:12]}, and version {version} of the journal has {known[:12]}"
            )
        return ""


def of_run(run: Path, present: Config) -> History:
    """The history of the run in the folder `run`, which goes on with `present`; of a new run that alone.

    Raises `JournalError` for a journal that cannot be read.
    """
    if not (run / "journal.sqlite").is_file():
        return History({0: present})
    journal = Journal.of(run)
    try:
        recorded, made = continuation.configs(journal), journal.versions()
    finally:
        journal.close()
    configs = {version: as_present(config, present) for version, config in recorded.items()}
    return History(configs or {0: present}, digests(recorded, made))


def digests(recorded: Mapping[int, Config], made: Mapping[int, Made]) -> dict[int, str]:
    """The digest of each version, as far as it has the same weights whenever it is made."""
    return {version: one.digest if continuation.is_exact(recorded, version) else ANY for version, one in made.items()}


def encode(history: History) -> bytes:
    """The bytes that a rank gets."""
    return msgspec.msgpack.encode(history)


def decode(history: bytes) -> History:
    """The history in these bytes."""
    return msgspec.msgpack.decode(history, type=History)
