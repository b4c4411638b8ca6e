"""Builds both ends of the configured transport. No other module depends on the kind of transport."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from msgspec import structs

from streamppo import durable
from streamppo.config.learner import Folder, Nixl, ObjectStore
from streamppo.config.sections import LOCAL, Config
from streamppo.errors import RunError
from streamppo.weights.transport import Receiver, Sender


class TransportEnds(NamedTuple):
    """Functions that make a rank's end and an actor's end. They raise `WeightsError` if a library is missing."""

    sender: Callable[[int], Sender]
    receiver: Callable[[], Receiver]


def ends(config: Config) -> TransportEnds:
    """Return both ends of the configured transport."""
    match config.learner.transport:
        case ObjectStore():
            from streamppo.weights import object_store

            return TransportEnds(lambda rank: object_store.ObjectStoreSender(), object_store.ObjectStoreReceiver)
        case Folder(path=path):
            from streamppo.weights import folder

            return TransportEnds(partial(folder.FolderSender, Path(path)), folder.FolderReceiver)
        case Nixl():
            from streamppo.weights import nixl

            local = config.cluster.address == LOCAL
            return TransportEnds(lambda rank: nixl.NixlSender(local=local), partial(nixl.NixlReceiver, local=local))


def with_run_folder(config: Config, run: Path) -> Config:
    """Return `config` in which a folder transport has the path of the run's own folder."""
    transport = config.learner.transport
    if not isinstance(transport, Folder):
        return config
    name = f"{run.name}-{crc32(str(run.resolve()).encode()):08x}"
    folder = Path(transport.path) / name if transport.path else run / "weights"
    return structs.replace(config, learner=structs.replace(config.learner, transport=Folder(str(folder))))


def create_folder(config: Config) -> None:
    """Create the weights folder of a `with_run_folder` configuration, without earlier files. Raises `RunError`."""
    delete_folder(config)
    if isinstance(transport := config.learner.transport, Folder):
        with durable.naming(Path(transport.path), RunError):
            Path(transport.path).mkdir(parents=True, exist_ok=True)


def delete_folder(config: Config) -> None:
    """Delete the weights folder of a `with_run_folder` configuration. Other transports leave no files."""
    if isinstance(transport := config.learner.transport, Folder):
        shutil.rmtree(transport.path, ignore_errors=True)


def without_transport(config: Config) -> Config:
    """Return the configuration of ranks whose versions are discarded: they need no folder and no library."""
    return structs.replace(config, learner=structs.replace(config.learner, transport=ObjectStore()))
