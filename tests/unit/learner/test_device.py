"""The process group of the learner's ranks."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY
from torch.distributed.device_mesh import init_device_mesh

from streamppo.errors import UpdateError
from streamppo.learner import device

sys.path.insert(0, str(REPOSITORY))

from benchmarks.lib import networks

REFUSAL = networks.refusal()

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def limit(group: dist.ProcessGroup | None) -> object:
    """The limit of a collective of `group`."""
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.fixture(autouse=True)
def interfaces_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        # Set first, so that it is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return "127.0.0.1", free.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "by_the_user", "expected"),
    [("127.0.0.1", None, LOOPBACK), ("127.0.0.1", "eth1", "eth1"), ("nowhere", None, None)],
    ids=["local", "local-set", "cluster"],
)
def test_the_ranks_of_a_local_run_talk_on_loopback_alone(
    monkeypatch: pytest.MonkeyPatch, host: str, by_the_user: str | None, expected: str | None
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(device, "_store", lambda *_: None)
    if host == "nowhere":
        monkeypatch.setattr(device, "interface_to", lambda *_: "")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.extend(map(os.environ.get, INTERFACES)))
    if by_the_user is not None:
        for name in INTERFACES:
            monkeypatch.setenv(name, by_the_user)
    device.join(torch.device("cpu"), (host, 1), 0, 1)
    assert seen == [expected, expected]


def test_ranks_of_a_cluster_talk_by_gloo_where_they_reach_rank_0_and_nccl_chooses_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(device, "_store", lambda *_: None)
    monkeypatch.setattr(device, "interface_to", lambda host, port: f"to {host}")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.extend(map(os.environ.get, INTERFACES)))
    device.join(torch.device("cpu"), ("10.0.0.1", 1), 0, 1)
    assert seen == ["to 10.0.0.1", None]


def test_the_way_to_an_address_has_an_interface_and_one_that_nobody_reaches_has_none() -> None:
    assert device.interface_to("127.0.0.1", 1) == device.interface_to("localhost", 1) == LOOPBACK
    # A network that no machine may have a way to.
    assert device.interface_to("255.255.255.255", 1) == ""


TALK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from streamppo.errors import UpdateError
from streamppo.learner import device

device.LOAD = timedelta(seconds=60)
rank, host = int(sys.argv[1]), sys.argv[2]
device.join(torch.device("cpu"), (host, 4567), rank, 2)
number = torch.ones(1) * (rank + 1)
dist.all_reduce(number)
print(number.item())
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(REFUSAL), reason=f"no networks: {REFUSAL}")
def test_ranks_on_two_nodes_meet_although_the_name_of_their_machine_is_loopback() -> None:
    with networks.made() as made:
        links = [made.join(), made.join()]
        ranks = [
            subprocess.Popen(
                [*link.prefix, sys.executable, "-c", TALK, str(rank), links[0].address],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, link in enumerate(links)
        ]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [text.split()[-1] for text in said] == ["3.0", "3.0"], said


def test_collectives_have_long_limits_while_models_are_read_and_short_ones_after(address: tuple[str, int]) -> None:
    device.join(torch.device("cpu"), address, 0, 1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        assert (limit(dist.group.WORLD), limit(mesh.get_group())) == (device.LOAD, device.LOAD)
        device.expect(device.UPDATE, mesh)
        assert (limit(dist.group.WORLD), limit(mesh.get_group())) == (device.UPDATE, device.UPDATE)
        # NCCL's own limit is 10 minutes: too short for a model that is read, and enough for an update.
        assert device.UPDATE <= timedelta(minutes=10) < timedelta(hours=1) <= device.LOAD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_rank_0_listens_at_an_address_of_either_family(host: str) -> None:
    try:
        with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    device.join(torch.device("cpu"), (host, port), 0, 1)
    try:
        assert device.gather("met") == ["met"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_are_asked_for_where_there_are_other_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda _: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_: tensor.mul_(2))
    tensor = torch.ones(3)
    device.add_up(tensor)
    assert tensor.tolist() == [float(ranks)] * 3


def test_an_operation_without_a_deterministic_form_is_named_with_the_setting_and_other_errors_pass() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        named = pytest.raises(UpdateError, match=r"operation put_ has no .* set learner\.exact = false$")
        with named, device.naming_errors():
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(RuntimeError, match="size of tensor"), device.naming_errors():
        torch.zeros(2) + torch.zeros(3)


def test_a_full_gpu_is_named_with_the_settings_that_take_memory() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB, of which"
    match = r"^the GPU's memory is full \(CUDA out of memory\. Tried to allocate 2\.00 GiB\): set model\.gradient_"
    with pytest.raises(UpdateError, match=match), device.naming_errors():
        raise torch.OutOfMemoryError(said)
