"""The versions that can be pulled: a whole one, and the deltas that lead from it to the newest. Pure: no Ray.

whole 12  ->  delta 13  ->  delta 14      an engine at 13 takes one delta, an engine at 11 or with nothing takes all
"""

from typing import Generic, NamedTuple, TypeVar

from streamppo.errors import WeightsError
from streamppo.types import Push, WireStruct

T = TypeVar("T")


class PublishReply(WireStruct, frozen=True):
    """The answer to the ranks of a learner when a version is published: its digest.

    `whole` is the version from which all newer ones can be made; with `wants_whole` the next one is to be another.
    """

    digest: str
    whole: int
    wants_whole: bool


class LedgerEntry(NamedTuple, Generic[T]):
    """A published version. The transport fetches its buckets by `handle`."""

    push: Push
    handle: T


class Ledger(Generic[T]):
    """One learner's newest versions, each with a handle of type T; they may come in any order."""

    def __init__(self) -> None:
        self._entries: dict[int, LedgerEntry[T]] = {}

    def publish(self, push: Push, handle: T) -> None:
        """Add a version; the same one again brings its bytes from elsewhere. Older ones than a whole one are dropped.

        Raises `WeightsError` for a version that was there with other weights.
        """
        known = self._entries.get(push.version)
        if known is not None and known.push.digest != push.digest:
            raise WeightsError(f"version {push.version} was published again with other weights")
        self._entries[push.version] = LedgerEntry(push, handle)
        whole = max((version for version, one in self._entries.items() if one.push.base_version is None), default=0)
        self._entries = {version: entry for version, entry in self._entries.items() if version >= whole}

    @property
    def newest(self) -> int | None:
        """The newest version that can be made from a whole one, if there is one."""
        chain = self._chain()
        return chain[-1].push.version if chain else None

    def versions_after(self, version: int) -> list[LedgerEntry[T]]:
        """Return, in order, all that `version`, or nothing, needs to become the newest; empty if `version` is that."""
        chain = self._chain()
        if not chain or version < chain[0].push.version:
            return chain
        return [entry for entry in chain if entry.push.version > version]

    def reply_to(self, digest: str) -> PublishReply:
        """Answer for a version with `digest`: where the deltas have as many bytes as the whole one, they are to end."""
        chain = self._chain()
        first, *deltas = [sum(entry.push.bucket_bytes) for entry in chain] or [0]
        whole = chain[0].push.version if chain else 0
        return PublishReply(digest=digest, whole=whole, wants_whole=sum(deltas) >= first)

    def _chain(self) -> list[LedgerEntry[T]]:
        """The whole version, and the deltas behind it that have come without a gap."""
        chain: list[LedgerEntry[T]] = []
        for version in sorted(self._entries):
            entry = self._entries[version]
            if entry.push.base_version is None:
                chain = [entry]
            elif chain and entry.push.base_version == chain[-1].push.version:
                chain.append(entry)
        return chain
