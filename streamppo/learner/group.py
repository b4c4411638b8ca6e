"""The learner as the driver sees it: one Ray actor for each rank."""

from collections.abc import Callable
from typing import Any

import ray

from streamppo.config.sections import Config
from streamppo.learner.rank import Rank


class LearnerGroup:
    """Every method calls every rank and returns one ObjectRef for each, rank 0 first.

    The caller waits for all of them: where one rank fails, the others stand in a collective that never ends. `place`
    gives Ray's options for where a rank lives.
    """

    def __init__(
        self, config: Config, config_bytes: bytes, queue: Any, place: Callable[[int], dict[str, Any]], epoch: int = 0
    ) -> None:
        actor: Any = ray.remote(Rank)
        self.ranks = [
            actor.options(name=f"learner-{rank}.{epoch}", max_concurrency=1, **place(rank)).remote(
                config_bytes, rank, queue, epoch
            )
            for rank in range(config.learner.ranks)
        ]

    def kill(self) -> None:
        """End every rank."""
        for rank in self.ranks:
            ray.kill(rank)

    def rendezvous(self) -> Any:
        """Where rank 0 can be met, as a reference to hand to `setup`."""
        return self.ranks[0].rendezvous.remote()

    def make_model(self, folder: str) -> list[Any]:
        """Create builtin:tiny, on rank 0."""
        return [self.ranks[0].make_model.remote(folder)]

    def setup(self, address: Any, model_path: str, resume_from: str | None) -> list[Any]:
        """Load and push the first version."""
        return [rank.setup.remote(address, model_path, resume_from) for rank in self.ranks]

    def update(self) -> list[Any]:
        """Make the next version."""
        return [rank.update.remote() for rank in self.ranks]

    def configure(self, config_bytes: bytes) -> list[Any]:
        """Another configuration holds from the present version on."""
        return [rank.configure.remote(config_bytes) for rank in self.ranks]

    def settle(self) -> list[Any]:
        """Wait until the last push is published and the last checkpoint written."""
        return [rank.settle.remote() for rank in self.ranks]

    def save(self, folder: str) -> list[Any]:
        """Start a checkpoint; it is written beside the updates that follow."""
        return [rank.save.remote(folder) for rank in self.ranks]

    def export(self, folder: str) -> list[Any]:
        """Write the policy as a Hugging Face folder."""
        return [rank.export.remote(folder) for rank in self.ranks]
