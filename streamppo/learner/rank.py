"""The Ray actor of a learner rank: a mailbox around one `Training`."""

from typing import TYPE_CHECKING

import msgspec
import ray

from streamppo import process
from streamppo.config.sections import Config
from streamppo.types import encode

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.source import BatchSource


class Rank:
    """A mailbox. Calls come from the driver, one at a time; ranks get the same calls in the same order.

    torch is imported where a rank is made: the driver knows the class alone, and starts seconds earlier without it.
    """

    def __init__(self, config: bytes, rank: int, queue: "ActorProxy[BatchSource]", epoch: int) -> None:
        from streamppo.learner.training import Training

        process.log_to_stdout(f"learner-{rank}")
        self._training = Training(msgspec.msgpack.decode(config, type=Config), rank, queue, epoch)

    @ray.method
    def rendezvous(self) -> tuple[str, int]:
        """Return an address at which this rank can be met."""
        from ray._common.network_utils import find_free_port

        return ray.util.get_node_ip_address(), find_free_port()

    @ray.method
    def make_model(self, folder: str) -> None:
        """Create builtin:tiny at `folder`, unless it is there."""
        self._training.make_model(folder)

    @ray.method
    def setup(self, address: tuple[str, int], model_path: str, resume_from: str | None) -> int:
        """Join the group, load the model or a checkpoint, push the first version. Returns that version."""
        return self._training.setup(address, model_path, resume_from)

    @ray.method
    def update(self) -> bytes:
        """Make the next version. Returns an encoded `UpdateReport`, nothing if the run was stopped.

        Raises `CheckpointError` if the checkpoint that was written beside training could not be written.
        """
        report = self._training.update()
        return b"" if report is None else encode(report)

    @ray.method
    def configure(self, config: bytes) -> None:
        """Let `config` hold from the present version on, as it did in a run that was resumed with changes."""
        self._training.configure(msgspec.msgpack.decode(config, type=Config))

    @ray.method
    def settle(self) -> None:
        """Wait until the last push is published and the last checkpoint has its name."""
        self._training.settle()

    @ray.method
    def save(self, folder: str) -> None:
        """Start a checkpoint of the present version under `folder`; it is written beside training. A collective."""
        self._training.save(folder)

    @ray.method
    def export(self, folder: str) -> str:
        """Write the policy as a Hugging Face folder. A collective. Returns the digest of the last push."""
        return self._training.export(folder)
