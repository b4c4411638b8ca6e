"""Which versions exist, and where the newest of them can be pulled. Pure: no Ray."""

from collections import OrderedDict
from typing import Any, NamedTuple

from streamppo.errors import WeightsError
from streamppo.types import Push


class Entry(NamedTuple):
    """A published version. `handle` is whatever the transport needs to fetch its buckets."""

    push: Push
    handle: Any


class Ledger:
    """Keeps the newest `keep` entries, so that memory holds a fixed number of versions however slow an engine is."""

    def __init__(self, keep: int = 2) -> None:
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._keep = keep
        self._first: int | None = None

    def publish(self, push: Push, handle: Any) -> None:
        """Add the next version; the same one again brings its bytes from elsewhere.

        Raises `WeightsError` on a gap or a conflict.
        """
        newest = self.newest
        if newest is not None:
            if push.version == newest and push.digest == self._entries[newest].push.digest:
                self._entries[newest] = Entry(push, handle)
                return
            if push.version != newest + 1:
                raise WeightsError(f"version {push.version} was published after version {newest}")
        else:
            self._first = push.version
        self._entries[push.version] = Entry(push, handle)
        while len(self._entries) > self._keep:
            self._entries.popitem(last=False)

    @property
    def newest(self) -> int | None:
        """The newest version, if there is one."""
        return next(reversed(self._entries), None)

    def after(self, version: int) -> Entry | None:
        """The newest entry, if it is newer than `version`."""
        newest = self.newest
        return self._entries[newest] if newest is not None and newest > version else None

    def knows(self, version: int) -> bool:
        """Whether `version` was ever published here."""
        newest = self.newest
        return newest is not None and self._first is not None and self._first <= version <= newest
