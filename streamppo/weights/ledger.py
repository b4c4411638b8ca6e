"""The versions that engines can pull: a whole version, and the deltas from it to the newest version. Pure: no Ray.

whole 12  ->  delta 13  ->  delta 14      an engine at 13 pulls one delta; an engine at 11 or without weights pulls all
"""

from typing import Generic, NamedTuple, TypeVar

from streamppo.errors import WeightsError
from streamppo.types import Push, WireStruct

T = TypeVar("T")


class PublishReply(WireStruct, frozen=True):
    """The reply to ranks that published `digest`: deltas follow version `whole`, unless the next push must be whole."""

    digest: str
    whole: int
    wants_whole: bool


class LedgerEntry(NamedTuple, Generic[T]):
    """A published version, and the handle with which the transport fetches its buckets."""

    push: Push
    handle: T


class Ledger(Generic[T]):
    """One learner's newest versions, each with a handle of type T. Versions may arrive in any order."""

    def __init__(self) -> None:
        self._entries: dict[int, LedgerEntry[T]] = {}

    def publish(self, push: Push, handle: T) -> None:
        """Add a version, or replace its handle. Raises `WeightsError` if it was published with other weights."""
        previous = self._entries.get(push.version)
        if previous is not None and previous.push.digest != push.digest:
            raise WeightsError(f"version {push.version} was published again with other weights")
        self._entries[push.version] = LedgerEntry(push, handle)
        newest_whole = max(
            (version for version, earlier in self._entries.items() if earlier.push.base_version is None), default=0
        )
        self._entries = {version: entry for version, entry in self._entries.items() if version >= newest_whole}

    @property
    def newest(self) -> int | None:
        """The newest version that follows from a whole version by deltas without a gap; None if there is none."""
        chain = self._chain()
        return chain[-1].push.version if chain else None

    def versions_after(self, version: int) -> list[LedgerEntry[T]]:
        """Return the entries that lead from `version` (-1: no weights) to the newest version, in order."""
        chain = self._chain()
        if not chain or version < chain[0].push.version:
            return chain
        return [entry for entry in chain if entry.push.version > version]

    def reply_to(self, digest: str) -> PublishReply:
        """Return the reply for a version with `digest`. A whole push is wanted if the deltas together are as large."""
        chain = self._chain()
        first, *deltas = [sum(entry.push.bucket_bytes) for entry in chain] or [0]
        whole = chain[0].push.version if chain else 0
        return PublishReply(digest=digest, whole=whole, wants_whole=sum(deltas) >= first)

    def _chain(self) -> list[LedgerEntry[T]]:
        chain: list[LedgerEntry[T]] = []
        for version in sorted(self._entries):
            entry = self._entries[version]
            if entry.push.base_version is None:
                chain = [entry]
            elif chain and entry.push.base_version == chain[-1].push.version:
                chain.append(entry)
        return chain
