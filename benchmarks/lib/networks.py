"""Nodes whose network can fail: each has a link to one bridge; a cut link drops packets without resetting connections.

    the machine's own network            a namespace for the bridge         a namespace for each other node
    head: driver, queue, Ray's GCS  ---- port    bridge    ports ---------- learner | rollout actor | nothing
    198.18.N.1                                                              198.18.N.2, .3, .4, ...

A cut takes the port of a link off the bridge: both ends stay up, and no packet passes in either direction. All other
nodes still reach each other. It needs root, iproute2, and a kernel with namespaces, veth and bridges.
"""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Generator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

IP = shutil.which("ip")
SUBNETS, TAKEN = 250, "File exists"
BRIDGE, INSIDE = "bridge", "eth0"
"""Names within a namespace."""


class Link(NamedTuple):
    """The link from one node to the bridge: the node's namespace, its address, and the bridge's port."""

    namespace: str
    address: str
    port: str

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs in the node's namespace."""
        return [str(IP), "netns", "exec", self.namespace]


class Networks:
    """A bridge, the head's link, and a link for each joined node. `port` is a free port on the head for Ray's GCS."""

    def __init__(self) -> None:
        self._joined, self._linked, self.port = 1, False, 0
        self._namespaces: list[str] = []
        number = self._number = self._claim()
        self.head = Link("", f"198.18.{number}.1", "port1")

    def begin(self) -> None:
        """Make the bridge and the head's link. Raises `RuntimeError` if the kernel refuses."""
        _ip("-n", self._name, "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", self._name, "link", "set", BRIDGE, "up")
        _ip("link", "add", self._name, "type", "veth", "peer", "name", self.head.port, "netns", self._name)
        self._linked = True
        _ip("addr", "add", f"{self.head.address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        self._plug(self.head)
        with socket.create_server((self.head.address, 0)) as free:
            self.port = int(free.getsockname()[1])

    def join(self) -> Link:
        """Make a namespace with its own address, and a link from it to the bridge."""
        self._joined += 1
        name = f"{self._name}-{self._joined}"
        link = Link(name, f"198.18.{self._number}.{self._joined}", f"port{self._joined}")
        self._namespace(name)
        peer = ("type", "veth", "peer", "name", link.port, "netns", self._name)
        _ip("link", "add", INSIDE, "netns", name, *peer)
        _ip("-n", name, "addr", "add", f"{link.address}/24", "dev", INSIDE)
        _ip("-n", name, "link", "set", INSIDE, "up")
        self._plug(link)
        return link

    def cut(self, link: Link, other: Link | None = None) -> None:
        """Drop all packets of a link, or only those between two links, in both directions, until the same `mend`."""
        if other is None:
            _ip("-n", self._name, "link", "set", link.port, "nomaster")
        else:
            self._isolate("on", link, other)

    def mend(self, link: Link, other: Link | None = None) -> None:
        """Undo the `cut` with the same arguments."""
        if other is None:
            _ip("-n", self._name, "link", "set", link.port, "master", BRIDGE)
        else:
            self._isolate("off", link, other)

    def _isolate(self, state: str, *links: Link) -> None:
        """Set the isolation of ports: isolated ports reach all ports but each other."""
        for link in links:
            _ip("-n", self._name, "link", "set", link.port, "type", "bridge_slave", "isolated", state)

    def _plug(self, link: Link) -> None:
        _ip("-n", self._name, "link", "set", link.port, "up")
        self.mend(link)

    @property
    def _name(self) -> str:
        """The name of the bridge's namespace and of the head's interface."""
        return f"nodes{self._number}"

    def _claim(self) -> int:
        """Claim a number that is free on this machine by creating its namespace."""
        for number in range(1, SUBNETS):
            try:
                self._namespace(f"nodes{number}")
            except RuntimeError as error:
                if TAKEN not in str(error):
                    raise
            else:
                return number
        raise RuntimeError(f"{SUBNETS - 1} networks are there already")

    def _namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._namespaces.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def end(self) -> None:
        """Remove everything; all processes in the namespaces must have ended."""
        if self._linked:
            # A deleted namespace keeps its links for a while.
            _ip("link", "delete", self._name)
            self._linked = False
        for name in self._namespaces:
            _ip("netns", "delete", name)
        self._namespaces.clear()


@contextlib.contextmanager
def made() -> Generator[Networks]:
    """Networks that end with the block. Raises `RuntimeError` if none can be made."""
    networks = Networks()
    try:
        networks.begin()
        yield networks
    finally:
        networks.end()


def refusal() -> str:
    """The reason why networks cannot be made here; "" if they can."""
    try:
        with made() as networks:
            networks.join()
    except RuntimeError as error:
        return str(error)
    return ""


def longest_wait(lines: Sequence[Mapping[str, Any]], first: int, last: int) -> float | None:
    """The longest time in seconds between two updates among `first` to `last`; None for fewer than two."""
    times = [line["wall_s"] for line in lines if first <= line["update"] <= last]
    return max((after - before for before, after in pairwise(times)), default=None)


def _ip(*words: str) -> None:
    """Run `ip`. Raises `RuntimeError` with its error output."""
    if IP is None:
        raise RuntimeError("networks need ip (iproute2)")
    done = subprocess.run([IP, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
