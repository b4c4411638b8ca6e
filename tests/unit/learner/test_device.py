"""The process group of the learner's ranks."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streamppo.learner import device


def limit(group: dist.ProcessGroup | None) -> object:
    """The limit of a collective of `group`."""
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return "127.0.0.1", free.getsockname()[1]


def test_collectives_have_long_limits_while_models_are_read_and_short_ones_after(address: tuple[str, int]) -> None:
    device.join(torch.device("cpu"), address, 0, 1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        assert (limit(dist.group.WORLD), limit(mesh.get_group())) == (device.LOAD, device.LOAD)
        device.expect_updates(mesh)
        assert (limit(dist.group.WORLD), limit(mesh.get_group())) == (device.UPDATE, device.UPDATE)
        assert device.UPDATE < device.LOAD
    finally:
        dist.destroy_process_group()
