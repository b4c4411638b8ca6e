"""One copy of each version for all rollout actors of a machine, where their engines read shared memory.

    leader       the actor that has bound the machine's name: it pulls every version into new shared memory, checks it,
                 and gives its descriptors to whoever asks. It pulls beside its own engine, whose swaps delay nobody
    followers    ask the leader for the version that the queue has announced

    consumes     versions from the ledger (the leader), or from the leader
    produces     the newest version, in a replica that the machine has once
    waits for    a version that is newer than the engine's; a follower for its leader
    unblocks     the next swap of `WeightSync`

The name is a socket of Linux's abstract namespace: it ends with the leader, and the next actor that finds no leader
takes its place. The memory ends with the last process that uses it. So nothing remains, whoever dies.

Of N actors with a model of S bytes, the machine holds S for each version in use, which are three: the served one, the
next, and the one that is being pulled; an engine that falls behind keeps its older one.
"""

import asyncio
import os
import socket
import struct
from contextlib import suppress
from functools import partial
from threading import Condition, Thread
from typing import TYPE_CHECKING, NamedTuple

from streamppo.errors import WeightsError
from streamppo.rollout.puller import Puller
from streamppo.types import Push, decode, encode
from streamppo.weights import shared_memory
from streamppo.weights.content import check
from streamppo.weights.shared_memory import SharedTensors
from streamppo.weights.transport import Receiver

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor

POLL_S = 5.0
"""A leader replies after this many seconds that it has no newer version yet."""
AGAIN_S = 0.05
"""Seconds until the next try, where there is no leader or no version yet."""
PULLS = 3
"""A leader fails after this number of successive versions that are not as they were pushed."""
WANTED, SIZE = struct.Struct("<q"), struct.Struct("<I")
"""A request: the version below the wanted one. The length of a reply's push; 0 if there is no such version yet."""
MOST_DESCRIPTORS = 200
"""Linux passes at most 253 descriptors in a message."""
BACKLOG = 64


class MachineVersion(NamedTuple):
    """A version's description and its memory."""

    push: Push
    shared: SharedTensors


class MachinePuller(Puller):
    """A `Puller` of the actor `name` that has its versions in common with the other actors of `life` on this machine.

    `life` is a name that only the actors of one driver have. Blocks of shared memory have about `block_bytes`.
    """

    def __init__(
        self, name: str, queue: "ActorProxy[QueueActor]", receiver: Receiver, *, life: str, block_bytes: int
    ) -> None:
        super().__init__(name, queue, receiver)
        self._address, self._block_bytes = f"\0streamppo-{os.getuid()}-{life}", block_bytes
        self._leader: Leader | None = None
        self._leading: asyncio.Task[None] | None = None

    async def newer(self, version: int) -> Push:
        """See `Puller.newer`. Raises `WeightsError` if this actor leads, and what it pulls is not as it was pushed."""
        while True:
            pushes = await self.queue.weights_after.remote(self.name, version, self.replica.version)
            if not pushes:
                continue
            newest = decode(pushes[-1][0], Push).version
            made = await self._own(newest) if self._lead() else await asyncio.to_thread(self._ask, newest)
            if made is not None:
                self.replica.adopt(*made)
                return made.push
            await asyncio.sleep(AGAIN_S)

    def _lead(self) -> bool:
        """Return True if this actor leads, also if it has just begun to."""
        if self._leader is None and (listening := _bind(self._address)) is not None:
            self._leader = Leader(listening)
            pull = partial(shared_memory.new, block_bytes=self._block_bytes)
            puller = Puller(f"{self.name}/machine", self.queue, self._receiver, memory=pull)
            self._leading = asyncio.create_task(_pull_for_all(puller, self._leader))
        return self._leader is not None

    async def _own(self, version: int) -> MachineVersion | None:
        """The leader's own version, once it is `version` or newer; None after `POLL_S`. Raises what pulling raises."""
        assert self._leader is not None and self._leading is not None
        waiting = asyncio.ensure_future(asyncio.to_thread(self._leader.wait, version))
        await asyncio.wait([waiting, self._leading], return_when=asyncio.FIRST_COMPLETED)
        if self._leading.done():
            self._leading.result()
        return await waiting

    def _ask(self, version: int) -> MachineVersion | None:
        """The leader's version, if it is `version` or newer; None if there is none yet, or no leader any more."""
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(2 * POLL_S)
            channel.connect(self._address)
            if _peer(channel) != os.getuid():
                raise WeightsError(f"another user's process has the name {self._address[1:]!r}")
            channel.sendall(WANTED.pack(version))
            return _receive(channel, self._block_bytes)
        return None


class Leader:
    """Gives the newest version to followers, each in a thread of its own; `listening` is the machine's name."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._newest: MachineVersion | None = None
        self._changed = Condition()
        Thread(target=self._accept, name="weights", daemon=True).start()

    def publish(self, made: MachineVersion) -> None:
        """Give this version from now on."""
        with self._changed:
            self._newest = made
            self._changed.notify_all()

    def wait(self, version: int) -> MachineVersion | None:
        """Return the newest version, once it is `version` or newer; None after `POLL_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None and self._newest.push.version >= version, POLL_S)
            return self._newest if self._newest is not None and self._newest.push.version >= version else None

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                channel, _ = self._listening.accept()
                Thread(target=self._answer, args=(channel,), daemon=True).start()

    def _answer(self, channel: socket.socket) -> None:
        # A follower that has gone away needs no answer.
        with suppress(OSError), channel:
            if _peer(channel) != os.getuid():
                return
            channel.settimeout(2 * POLL_S)
            (version,) = WANTED.unpack(_exactly(channel, WANTED.size))
            made = self.wait(version)
            if made is None:
                channel.sendall(SIZE.pack(0))
                return
            push, descriptors = encode(made.push), made.shared.descriptors()
            channel.sendall(SIZE.pack(len(push)) + push)
            for first in range(0, len(descriptors), MOST_DESCRIPTORS):
                socket.send_fds(channel, [b"f"], descriptors[first : first + MOST_DESCRIPTORS])


async def _pull_for_all(puller: Puller, leader: Leader) -> None:
    """Pull every version without end, and give it to all. Raises `WeightsError` after `PULLS` damaged ones in a row."""
    damaged = 0
    while True:
        replica = puller.replica
        try:
            push = await puller.newer(replica.version)
            await asyncio.to_thread(check, replica.contents, replica.tensors.items())
        except WeightsError:
            replica.forget()
            damaged += 1
            if damaged == PULLS:
                raise
            continue
        damaged = 0
        assert replica.shared is not None, "the replica has shared memory"
        leader.publish(MachineVersion(push, replica.shared))


def _bind(address: str) -> socket.socket | None:
    """Return a socket that listens at `address`; None if another process does."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(address)
    except OSError:
        listening.close()
        return None
    listening.listen(BACKLOG)
    return listening


def _receive(channel: socket.socket, block_bytes: int) -> MachineVersion | None:
    (length,) = SIZE.unpack(_exactly(channel, SIZE.size))
    if not length:
        return None
    push = decode(_exactly(channel, length), Push)
    sizes = [tensor.nbytes for tensor in push.tensors]
    count = len(shared_memory.plan(sizes, block_bytes).totals)
    descriptors: list[int] = []
    try:
        while len(descriptors) < count:
            _, some, _, _ = socket.recv_fds(channel, 1, MOST_DESCRIPTORS)
            if not some:
                raise ConnectionError("the leader has gone away")
            descriptors += some
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return MachineVersion(push, shared_memory.attach(descriptors, sizes, block_bytes))


def _exactly(channel: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises `ConnectionError` if there are fewer."""
    found = bytearray()
    while len(found) < count:
        if not (part := channel.recv(count - len(found))):
            raise ConnectionError("the other end has gone away")
        found += part
    return bytes(found)


def _peer(channel: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user
