"""A process group of a rollout actor and SGLang's ranks; SGLang itself is replaced."""

import asyncio
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from streamppo.rollout.sglang import push

pytest_plugins = ["rollout_log"]
FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


class Joined:
    """A link that records its calls, and answers them with `error`, if there is one, or never, if it `hangs`."""

    ranks = 2

    def __init__(self, dead: str = "", error: Exception | None = None, *, hangs: bool = False) -> None:
        self.called: dict[str, dict[str, Any]] = {}
        self.dead, self.error, self.hangs = dead, error, hangs

    async def call(self, name: str, /, **fields: object) -> None:
        self.called[name] = fields
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    async def death(self) -> str:
        return self.dead


def with_sglang(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        monkeypatch.setattr(sys.modules["sglang.srt.utils.common"], name, function, raising=False)


@pytest.mark.parametrize("host", FAMILIES)
def test_a_server_is_joined_at_an_address_of_either_version(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    link, ours = Joined(), dict[str, Any]()
    with_sglang(monkeypatch, init_custom_process_group=lambda **given: ours.update(given))
    with socket.create_server((host, 0), family=FAMILIES[host]) as server:
        shown = f"[{host}]" if ":" in host else host
        asyncio.run(push.by_group(8, f"http://{shown}:{server.getsockname()[1]}", False, link))  # pyright: ignore
    theirs = link.called["init_weights_update_group"]
    assert theirs["master_address"] == host
    assert ours["init_method"] == f"tcp://{shown}:{theirs['master_port']}"
    assert (ours["rank"], ours["world_size"], theirs["rank_offset"], theirs["world_size"]) == (0, 3, 1, 3)


def test_a_broken_group_is_a_broken_connection_so_that_sglang_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with_sglang(monkeypatch, init_custom_process_group=broken)
    with pytest.raises(ConnectionError, match="the process group with SGLang has failed: Connection closed by peer"):
        asyncio.run(push.by_group(8, "", False, Joined()))  # pyright: ignore[reportArgumentType]

    flat = SimpleNamespace(get_flattened_tensor=lambda: torch.zeros(1))
    bucket = SimpleNamespace(FlattenedTensorBucket=lambda named_tensors: flat)
    monkeypatch.setitem(sys.modules, "sglang.srt.weight_sync.tensor_bucket", bucket)  # pyright: ignore
    monkeypatch.setattr(torch.distributed, "broadcast", broken)
    group = push.ByGroup(Joined(), 8, "name", None, "cpu")  # pyright: ignore[reportArgumentType]
    asyncio.run(group.stage({"weight": torch.zeros(1)}))
    with pytest.raises(ConnectionError, match="the process group with SGLang has failed"):
        asyncio.run(group.carry(3, flush=False))


@pytest.mark.parametrize(
    ("link", "calls"),
    [
        (Joined(), 1),
        (Joined(error=ValueError("The group to be destroyed does not exist.")), 1),
        (Joined(error=ConnectionError("it ended")), 1),
        (Joined(hangs=True), 1),
        (Joined(dead="killed"), 0),
    ],
    ids=["alive", "refuses", "disconnects", "hangs", "dead"],
)
def test_a_closed_group_is_left_by_both_sides(link: Joined, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    group: Any = SimpleNamespace(abort=lambda: ended.append("abort"))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", ended.append)
    monkeypatch.setattr(push, "LEAVE_S", 0.05)
    asyncio.run(push.ByGroup(link, 8, "name", group, "cpu").close())  # pyright: ignore[reportArgumentType]
    assert [*link.called.items()] == [("destroy_weights_update_group", {"group_name": "name"})][:calls]
    assert ended == ["abort", group]


def test_an_error_of_the_own_side_is_logged(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error")

    group: Any = SimpleNamespace(abort=broken)
    asyncio.run(push.ByGroup(Joined(), 8, "name", group, "cpu").close())  # pyright: ignore[reportArgumentType]
    assert log_lines == ["the process group with SGLang could not be destroyed: CUDA error"]
