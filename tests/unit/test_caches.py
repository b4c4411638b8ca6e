"""Compiled kernels stay for the next process and run: the environment of a rank and of SGLang on a GPU."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamppo import process
from streamppo.config.sections import Config
from streamppo.driver.ray import environment
from streamppo.rollout.sglang import wire
from streamppo.types import encode

NAMES = (*process.CACHES, process.FLASH_KEEPS)
ALLOCATOR = "PYTORCH_ALLOC_CONF"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kernels, of a user who has set nothing."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "streamppo"


def expected(folder: Path) -> dict[str, str]:
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{folder}/flash-attention",
        "CUTE_DSL_CACHE_DIR": f"{folder}/cutlass",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }


def test_kernels_are_kept_in_one_folder_that_is_the_users_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert process.compile_caches() == expected(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Another process has the lock meanwhile.
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert process.compile_caches() == expected(folder)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert process.compile_caches() == expected(folder.parent / ".cache" / "streamppo")


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_wins(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    assert process.compile_caches() == {other: value for other, value in expected(folder).items() if other != name}
    # On a cluster it reaches the actors.
    assert environment.carried_variables(os.environ, frozenset())[name] == "0"


def no_folder(folder: Path, patch: pytest.MonkeyPatch) -> str:
    folder.parent.write_text("a file")
    return "Not a directory"


def anothers(folder: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(os, "getuid", lambda: 12345)
    return "another user's"


def no_locks(folder: Path, patch: pytest.MonkeyPatch) -> str:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    patch.setattr(fcntl, "flock", refuse)
    return "No locks available"


@pytest.mark.parametrize("fault", [no_folder, anothers, no_locks])
def test_a_folder_that_cannot_be_used_is_left_alone_and_named(
    fault: Callable[[Path, pytest.MonkeyPatch], str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    reason = fault(folder, monkeypatch)
    assert process.compile_caches() == {}
    assert logged.messages == [f"compiled kernels are not kept for the next run: {folder}: {reason}"]


def test_sglang_on_a_gpu_has_them(folder: Path, math_config: Callable[..., Config]) -> None:
    on_gpu = wire.environment(math_config("rollout.engine.kind=sglang", "rollout.gpus=1"), local=True)
    assert on_gpu.items() >= expected(folder).items()
    on_cpu = wire.environment(math_config("rollout.engine.kind=sglang"), local=True)
    assert on_gpu == on_cpu | expected(folder)


AT_TORCH = """
import json, os, sys
from streamppo.learner.rank import Rank

class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(json.dumps(dict(os.environ)), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
Rank(bytes.fromhex(sys.argv[1]), None, 0)
"""


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_rank_has_its_environment_before_torch_is_imported(
    gpus: int, folder: Path, math_config: Callable[..., Config]
) -> None:
    config = encode(math_config(f"learner.gpus={gpus}")).hex()
    before = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", AT_TORCH, config], env=before, capture_output=True, text=True, check=True
    )
    got = json.loads(done.stdout.splitlines()[-1])
    wanted = expected(folder) | {ALLOCATOR: "expandable_segments:True"} if gpus else {}
    assert {name: got[name] for name in (*NAMES, ALLOCATOR) if name in got} == wanted
