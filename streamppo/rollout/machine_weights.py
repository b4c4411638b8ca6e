"""Shares one copy of each version among the rollout actors of a machine, if their engines read shared memory.

    leader       the actor that has the machine's name. It pulls every version into new shared memory, checks it, and
                 sends the descriptors to followers. It pulls concurrently with the swaps of its engine
    followers    request the announced version from the leader

    consumes     versions from the ledger (the leader), or from the leader
    produces     the newest version, in the machine's only replica
    waits for    a version that is newer than the engine's; a follower waits for the leader to have it
    unblocks     the next swap of `WeightSync`

The machine's name is a socket address in Linux's abstract namespace, which is free again when the leader ends. The next
actor that finds no leader takes the name. Shared memory is freed when the last process that has it ends.

With any number of actors, a machine holds three copies of the model: the served version, the next, and the pulled one.
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
"""After this many seconds without a newer version, a leader replies that it has none."""
AGAIN_S = 0.05
"""Seconds until the next try if there is no leader, or no version so far."""
LONG_S, ROOM_S = 30.0, 300.0
"""Seconds after which a waiting actor logs this, and after which a leader without room for a version fails."""
REQUEST, SIZE = struct.Struct("<q"), struct.Struct("<I")
"""A request is a number, the oldest wanted version. A reply begins with the size of its push; 0: no version so far."""
MOST_DESCRIPTORS = 200
"""Maximum number of descriptors in a message; Linux passes at most 253."""


class MachineVersion(NamedTuple):
    """A version: its `push`, and the shared memory with its tensors."""

    push: Push
    shared: SharedTensors


class MachinePuller(Puller):
    """Pulls for the actor `name`, and shares versions with the driver's other actors (`namespace`) on this machine."""

    def __init__(
        self, name: str, queue: "ActorProxy[QueueActor]", receiver: Receiver, *, namespace: str, block_bytes: int
    ) -> None:
        super().__init__(name, queue, receiver)
        self._address, self._block_bytes = f"\0streamppo-{os.getuid()}-{namespace}", block_bytes
        self._leading: Leadership | None = None
        self._has_adopted = False
        self._missed_since, self._reason = 0.0, ""

    async def newer(self, version: int) -> Push:
        """See `Puller.newer`. A version that the engine refused is hashed again. Raises `WeightsError`."""
        while True:
            pushes = await self.queue.weights_after.remote(self.name, version, self.replica.version)
            if not pushes:
                continue
            announced = decode(pushes[-1][0], Push).version
            # `pushes` has references, which would keep the buckets in the object store.
            del pushes
            newest = await (
                self._wait_as_leader(announced) if self._lead() else asyncio.to_thread(self._ask_leader, announced)
            )
            if newest is not None:
                await self._adopt(newest)
                return newest.push
            self._report_wait(announced)
            await asyncio.sleep(AGAIN_S)

    async def _adopt(self, newest: MachineVersion) -> None:
        is_refused = self._has_adopted and self.replica.version < 0
        self.replica.adopt(*newest)
        self._has_adopted, self._missed_since = True, 0.0
        if is_refused:
            try:
                await asyncio.to_thread(check, self.replica.contents, self.replica.tensors.items())
            except WeightsError:
                self.replica.forget()
                self._resign()
                raise

    def _lead(self) -> bool:
        if self._leading is None and (listener := _bind(self._address)) is not None:
            log.info("pulls the weights for all rollout actors of this machine")
            leader, pull = Leader(listener), partial(shared_memory.new, block_bytes=self._block_bytes)
            puller = Puller(f"{self.name}/machine", self.queue, self._receiver, memory=pull)
            self._leading = Leadership(leader, asyncio.create_task(_pull_for_all(puller, leader)))
            # A failed leader gives up the name at once, because `newer` may notice the failure much later.
            self._leading.task.add_done_callback(lambda _: leader.close())
        return self._leading is not None

    def _resign(self) -> None:
        if self._leading is not None:
            self._leading.leader.close()
            self._leading.task.cancel()
            self._leading = None

    async def _wait_as_leader(self, version: int) -> MachineVersion | None:
        """Return `version` or a newer one when this leader has it; None after `POLL_S`. Raises errors of pulling."""
        assert self._leading is not None
        leader, task = self._leading
        waiting = asyncio.ensure_future(asyncio.to_thread(leader.wait, version))
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            self._leading = None
            task.result()
        return await waiting

    def _ask_leader(self, version: int) -> MachineVersion | None:
        """Return `version` or a newer one from the leader; None if it has none, or if there is no leader."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(2 * POLL_S)
                channel.connect(self._address)
                if _peer(channel) != os.getuid():
                    raise WeightsError(f"another user's process has the name {self._address[1:]!r}")
                channel.sendall(REQUEST.pack(version))
                return _receive(channel, self._block_bytes)
        except (OSError, EOFError) as error:
            self._reason = str(error) or "the leader has ended"
            return None

    def _report_wait(self, version: int) -> None:
        now = time.monotonic()
        self._missed_since = self._missed_since or now
        if now - self._missed_since > LONG_S:
            self._missed_since = now + 1e9
            reason = f": {self._reason}" if self._reason else ""
            log.warning("version %d has not come from this machine's leader for %d s%s", version, LONG_S, reason)


class Leader:
    """Sends the newest version to followers, to each in its own thread. `listener` has the machine's name."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._newest: MachineVersion | None = None
        self._changed = Condition()
        # Without this, a forked child would keep the socket's name in use after this process's death.
        os.register_at_fork(after_in_child=listener.close)
        Thread(target=self._accept, name="weights", daemon=True).start()

    def publish(self, newest: MachineVersion) -> None:
        with self._changed:
            self._newest = newest
            self._changed.notify_all()

    def wait(self, version: int) -> MachineVersion | None:
        """Return the newest version when it is `version` or newer; None after `POLL_S`."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._newest is not None and self._newest.push.version >= version, POLL_S
            )
            return self._newest if is_there else None

    def close(self) -> None:
        """Close the socket, so that another actor can lead."""
        with suppress(OSError):
            # `shutdown` ends the thread's `accept`; `close` alone would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                # For example, too many files are open, and some of them may be closed soon.
                time.sleep(AGAIN_S)
                continue
            try:
                Thread(target=self._answer, args=(channel,), daemon=True).start()
            except RuntimeError:
                channel.close()

    def _answer(self, channel: socket.socket) -> None:
        # A dead follower needs no answer.
        with suppress(OSError, EOFError), channel:
            if _peer(channel) != os.getuid():
                return
            channel.settimeout(2 * POLL_S)
            (version,) = REQUEST.unpack(read_exactly(channel, REQUEST.size))
            newest = self.wait(version)
            if newest is None:
                channel.sendall(SIZE.pack(0))
                return
            push, descriptors = encode(newest.push), newest.shared.descriptors()
            channel.sendall(SIZE.pack(len(push)) + push)
            for first in range(0, len(descriptors), MOST_DESCRIPTORS):
                socket.send_fds(channel, [b"f"], descriptors[first : first + MOST_DESCRIPTORS])


class Leadership(NamedTuple):
    """A leader, and the task that pulls for it."""

    leader: Leader
    task: asyncio.Task[None]


async def _pull_for_all(puller: Puller, leader: Leader) -> None:
    damaged, full_since = 0, 0.0
    replica = puller.replica
    while True:
        try:
            push = await puller.newer(replica.version)
            await asyncio.to_thread(check, replica.contents, replica.tensors.items())
        except NoRoom as error:
            if not full_since:
                log.warning("%s; waits until older versions are freed", error)
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
        leader.publish(MachineVersion(push, replica.detach()))


def _bind(address: str) -> socket.socket | None:
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(64)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise WeightsError(f"the actors of this machine cannot share weights: {error}") from error
    return listener


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
            _, received, _, _ = socket.recv_fds(channel, 1, MOST_DESCRIPTORS)
            if not received:
                raise EOFError("the leader has ended")
            descriptors += received
    except (OSError, EOFError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return MachineVersion(push, shared_memory.attach(descriptors, sizes, block_bytes))


def _peer(channel: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user
