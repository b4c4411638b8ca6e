"""The versions that can be pulled: the newest one, and the one before it. Pure: no Ray."""

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from streamppo.errors import WeightsError
from streamppo.types import Push

KEPT = 2
"""Entries that are kept, so that memory holds a fixed number of versions however slow an engine is."""
T = TypeVar("T")


class Entry(NamedTuple, Generic[T]):
    """A published version. The transport fetches its buckets by `handle`."""

    push: Push
    handle: T


class Ledger(Generic[T]):
    """The newest `KEPT` versions, each with a handle of type T."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, Entry[T]] = OrderedDict()

    def publish(self, push: Push, handle: T) -> None:
        """Add the next version; the same one again brings its bytes from elsewhere.

        Raises `WeightsError` on a gap or a conflict.
        """
        newest = self.newest
        if newest is not None and push.version != newest + 1 and not self._is_newest(push):
            raise WeightsError(f"version {push.version} was published after version {newest}")
        self._entries[push.version] = Entry(push, handle)
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)

    def _is_newest(self, push: Push) -> bool:
        return push.version == self.newest and push.digest == self._entries[push.version].push.digest

    @property
    def newest(self) -> int | None:
        """The newest version, if there is one."""
        return next(reversed(self._entries), None)

    def after(self, version: int) -> Entry[T] | None:
        """The newest entry, if it is newer than `version`."""
        newest = self.newest
        return self._entries[newest] if newest is not None and newest > version else None
