"""Builds both ends of the transport that the configuration chooses: the one place that asks which it is."""

import shutil
from pathlib import Path
from zlib import crc32

from msgspec import structs

from streamppo import durable
from streamppo.config.sections import LOCAL, Config
from streamppo.config.transport import Folder, Nixl, ObjectStore
from streamppo.errors import RunError
from streamppo.weights.transport import Receiver, Sender


def outlet(config: Config, rank: int) -> Sender:
    """Build the end of `rank`. Raises `WeightsError` if a library is missing."""
    match config.learner.transport:
        case ObjectStore():
            from streamppo.weights import object_store

            return object_store.ObjectStoreSender()
        case Folder(path=path):
            from streamppo.weights import folder

            return folder.FolderSender(Path(path), rank)
        case Nixl():
            from streamppo.weights import nixl

            return nixl.NixlSender(local=config.cluster.address == LOCAL)


def inlet(config: Config) -> Receiver:
    """Build the end of a rollout actor. Raises `WeightsError` if a library is missing."""
    match config.learner.transport:
        case ObjectStore():
            from streamppo.weights import object_store

            return object_store.ObjectStoreReceiver()
        case Folder():
            from streamppo.weights import folder

            return folder.FolderReceiver()
        case Nixl():
            from streamppo.weights import nixl

            return nixl.NixlReceiver(local=config.cluster.address == LOCAL)


def with_run_folder(config: Config, run: Path) -> Config:
    """The configuration as ranks and actors of `run` get it: a folder of weights is the run's alone."""
    match config.learner.transport:
        case Folder(path=path):
            own = Path(path) / f"{run.name}-{crc32(str(run.resolve()).encode()):08x}" if path else run / "weights"
            return structs.replace(config, learner=structs.replace(config.learner, transport=Folder(str(own))))
        case _:
            return config


def create_folder(config: Config) -> None:
    """Make the folder of weights of a `placed` configuration, without those of an earlier driver, whose ranks are dead.

    Raises `RunError` if it cannot be made.
    """
    end(config)
    if isinstance(chosen := config.learner.transport, Folder):
        with durable.naming(Path(chosen.path), RunError):
            Path(chosen.path).mkdir(parents=True, exist_ok=True)


def end(config: Config) -> None:
    """Delete what ranks of a `placed` configuration have left behind, if that outlives them."""
    if isinstance(chosen := config.learner.transport, Folder):
        shutil.rmtree(chosen.path, ignore_errors=True)


def without_transport(config: Config) -> Config:
    """The configuration of ranks whose versions go nowhere, as in a replay: nothing has to be there for them."""
    return structs.replace(config, learner=structs.replace(config.learner, transport=ObjectStore()))
