"""The history of a run, read from its journal. Needs no torch.

configs    the configuration of every update, with which a redone update is made
digests    hashes of every version's weights: a checkpoint with another hash belongs to another run
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from streamppo.config.diff import as_present
from streamppo.config.sections import Config
from streamppo.queue import resume_checks
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.store.journal import Journal

ANY = ""
"""Recorded in place of a digest if a redo of the version may give slightly different weights; it matches any digest."""


class History(msgspec.Struct, frozen=True):
    """`configs` by their first version, `digests` by version; if `digests` is empty, all checkpoints are the run's."""

    configs: dict[int, Config]
    digests: dict[int, str] = {}

    def at(self, version: int) -> Config:
        """The configuration of the update that starts at `version`: the last that begins by then."""
        return self.configs[max((first for first in self.configs if first <= version), default=min(self.configs))]

    def refusal(self, version: int, digest: str) -> str:
        """The reason why a checkpoint of `version` with weights of this digest is not the run's; "" if it is."""
        if not self.digests:
            return ""
        if (known := self.digests.get(version)) is None:
            return f"of another run: the journal has no version {version}"
        if known not in (ANY, digest):
            return (
                f"of another run: its weights are {digest[:12]}, and version {version} of the journal has {known[:12]}"
            )
        return ""


def read_history(run: Path, present: Config) -> History:
    """Read the history of a run; a new run has only the configuration `present`. Raises `JournalError`."""
    if not (run / "journal.sqlite").is_file():
        return History({0: present})
    journal = Journal.open_run(run)
    try:
        recorded, versions = resume_checks.configs(journal), journal.versions()
    finally:
        journal.close()
    configs = {version: as_present(config, present) for version, config in recorded.items()}
    return History(configs or {0: present}, digests(recorded, versions))


def digests(recorded: Mapping[int, Config], versions: Mapping[int, PublishedVersion]) -> dict[int, str]:
    """The digest of each version; `ANY` if a redo of the version may give other weights."""
    return {
        version: published.digest if resume_checks.is_exact(recorded, version) else ANY
        for version, published in versions.items()
    }
