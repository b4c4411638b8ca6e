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
import errno
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from functools import partial
from threading import Condition, Thread
from typing import TYPE_CHECKING, NamedTuple

from streamppo.errors import WeightsError
from streamppo.rollout.puller import RETRY_S, Puller
from streamppo.rollout.weight_sync import PULLS
from streamppo.tasks.rewards.processes.wire import read_exactly
from streamppo.types import Push, decode, encode
from streamppo.weights import shared_memory
from streamppo.weights.content import check
from streamppo.weights.shared_memory import NoRoom, SharedTensors
from streamppo.weights.transport import Receiver

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor

log = logging.getLogger(__name__)
POLL_S = 5.0
"""A leader replies after this many seconds that it has no newer version yet."""
AGAIN_S = 0.05
"""Seconds until the next try, where there is no leader or no version yet."""
LONG_S, ROOM_S = 30.0, 300.0
"""Seconds without a version after which an actor says so, and without room for one after which its leader fails."""
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
        self._leading: Leading | None = None
        self._has_taken = False
        self._missed_since, self._why = 0.0, ""

    async def newer(self, version: int) -> Push:
        """See `Puller.newer`. A version that the engine has refused is hashed before it is returned again.

        A version that a learner has made again with other weights (`learner.exact = false`) stays what it was for the
        actors of this machine. Raises `WeightsError` if this actor leads and cannot pull, if the memory is damaged, or
        if the machine gives no name.
        """
        while True:
            pushes = await self.queue.weights_after.remote(self.name, version, self.replica.version)
            if not pushes:
                continue
            newest = decode(pushes[-1][0], Push).version
            # References keep buckets in the object store.
            del pushes
            made = await self._own(newest) if self._lead() else await asyncio.to_thread(self._ask, newest)
            if made is not None:
                await self._adopt(made)
                return made.push
            self._report_wait(newest)
            await asyncio.sleep(AGAIN_S)

    async def _adopt(self, made: MachineVersion) -> None:
        is_refused = self._has_taken and self.replica.version < 0
        self.replica.adopt(*made)
        self._has_taken, self._missed_since = True, 0.0
        if is_refused:
            try:
                await asyncio.to_thread(check, self.replica.contents, self.replica.tensors.items())
            except WeightsError:
                self.replica.forget()
                self._resign()
                raise

    def _lead(self) -> bool:
        """Return True if this actor leads, also if it has just begun to."""
        if self._leading is None and (listening := _bind(self._address)) is not None:
            log.info("pulls the weights for all rollout actors of this machine")
            leader, pull = Leader(listening), partial(shared_memory.new, block_bytes=self._block_bytes)
            puller = Puller(f"{self.name}/machine", self.queue, self._receiver, memory=pull)
            self._leading = Leading(leader, asyncio.create_task(_pull_for_all(puller, leader)))
            # A leader that cannot pull gives up the name at once: its own engine may ask much later.
            self._leading.task.add_done_callback(lambda _: leader.close())
        return self._leading is not None

    def _resign(self) -> None:
        """Give up the name: whoever leads next pulls into new memory."""
        if self._leading is not None:
            self._leading.leader.close()
            self._leading.task.cancel()
            self._leading = None

    async def _own(self, version: int) -> MachineVersion | None:
        """The leader's own version, once it is `version` or newer; None after `POLL_S`. Raises what pulling raises."""
        assert self._leading is not None
        leader, task = self._leading
        waiting = asyncio.ensure_future(asyncio.to_thread(leader.wait, version))
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            self._leading = None
            task.result()
        return await waiting

    def _ask(self, version: int) -> MachineVersion | None:
        """The leader's version, if it is `version` or newer; None if there is none yet, or no leader any more."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(2 * POLL_S)
                channel.connect(self._address)
                if _peer(channel) != os.getuid():
                    raise WeightsError(f"another user's process has the name {self._address[1:]!r}")
                channel.sendall(WANTED.pack(version))
                return _receive(channel, self._block_bytes)
        except (OSError, EOFError) as error:
            self._why = str(error) or "the leader has gone away"
            return None

    def _report_wait(self, version: int) -> None:
        """Log once if no version has come for `LONG_S`."""
        present = time.monotonic()
        self._missed_since = self._missed_since or present
        if present - self._missed_since > LONG_S:
            self._missed_since = present + 1e9
            why = f": {self._why}" if self._why else ""
            log.warning("version %d has not come from this machine's leader for %d s%s", version, LONG_S, why)


class Leader:
    """Gives the newest version to followers, each in a thread of its own; `listening` is the machine's name."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._newest: MachineVersion | None = None
        self._changed = Condition()
        # A child that is forked, by whoever it may be, would keep the name after this process's death.
        os.register_at_fork(after_in_child=listening.close)
        Thread(target=self._accept, name="weights", daemon=True).start()

    def publish(self, made: MachineVersion) -> None:
        """Give this version from now on."""
        with self._changed:
            self._newest = made
            self._changed.notify_all()

    def wait(self, version: int) -> MachineVersion | None:
        """Return the newest version, once it is `version` or newer; None after `POLL_S`."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._newest is not None and self._newest.push.version >= version, POLL_S
            )
            return self._newest if is_there else None

    def close(self) -> None:
        """Give up the name."""
        with suppress(OSError):
            # Ends the thread's wait, which a close alone does not.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                # Of too many open files, for example: some may be closed soon.
                time.sleep(AGAIN_S)
                continue
            try:
                Thread(target=self._answer, args=(channel,), daemon=True).start()
            except RuntimeError:
                channel.close()

    def _answer(self, channel: socket.socket) -> None:
        # A follower that has gone away needs no answer.
        with suppress(OSError, EOFError), channel:
            if _peer(channel) != os.getuid():
                return
            channel.settimeout(2 * POLL_S)
            (version,) = WANTED.unpack(read_exactly(channel, WANTED.size))
            made = self.wait(version)
            if made is None:
                channel.sendall(SIZE.pack(0))
                return
            push, descriptors = encode(made.push), made.shared.descriptors()
            channel.sendall(SIZE.pack(len(push)) + push)
            for first in range(0, len(descriptors), MOST_DESCRIPTORS):
                socket.send_fds(channel, [b"f"], descriptors[first : first + MOST_DESCRIPTORS])


class Leading(NamedTuple):
    """A leader, and the task that pulls for it."""

    leader: Leader
    task: asyncio.Task[None]


async def _pull_for_all(puller: Puller, leader: Leader) -> None:
    """Pull every version without end, and give it to all.

    Raises `WeightsError` after `PULLS` damaged ones in a row, and if there is no room for one during `ROOM_S`.
    """
    damaged, full_since = 0, 0.0
    replica = puller.replica
    while True:
        try:
            push = await puller.newer(replica.version)
            await asyncio.to_thread(check, replica.contents, replica.tensors.items())
        except NoRoom as error:
            if not full_since:
                log.warning("%s; waits for older versions to end", error)
            full_since = full_since or time.monotonic()
            if time.monotonic() - full_since > ROOM_S:
                raise
            await asyncio.sleep(RETRY_S)
            continue
        except WeightsError:
            replica.forget()
            damaged += 1
            if damaged == PULLS:
                raise
            await asyncio.sleep(RETRY_S)
            continue
        damaged, full_since = 0, 0.0
        leader.publish(MachineVersion(push, replica.give()))


def _bind(address: str) -> socket.socket | None:
    """Return a socket that listens at `address`; None if another process does. Raises `WeightsError` for no socket."""
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise WeightsError(f"the actors of this machine cannot share weights: {error}") from error
    return listening


def _receive(channel: socket.socket, block_bytes: int) -> MachineVersion | None:
    (length,) = SIZE.unpack(read_exactly(channel, SIZE.size))
    if not length:
        return None
    push = decode(read_exactly(channel, length), Push)
    sizes = [tensor.nbytes for tensor in push.tensors]
    count = len(shared_memory.plan(sizes, block_bytes).totals)
    descriptors: list[int] = []
    try:
        while len(descriptors) < count:
            _, some, _, _ = socket.recv_fds(channel, 1, MOST_DESCRIPTORS)
            if not some:
                raise EOFError("the leader has gone away")
            descriptors += some
    except (OSError, EOFError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return MachineVersion(push, shared_memory.attach(descriptors, sizes, block_bytes))


def _peer(channel: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user
