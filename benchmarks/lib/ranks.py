"""Runs a function in several processes of one group, each with one thread, and measures peak memory."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist


def of_ranks(function: Callable[..., dict[str, float]], ranks: int, *arguments: object) -> list[dict[str, float]]:
    """The results of `function(*arguments)`, a function at the top of a module, on `ranks` processes, by rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, f"{folder}/store", function, arguments, answers
        workers = [context.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        found = dict(answers.get() for _ in workers)
        for worker in workers:
            worker.join()
    return [found[rank] for rank in range(ranks)]


@contextmanager
def most_memory() -> Iterator[Callable[[], float]]:
    """Watch this process; the yielded function returns its peak memory in MiB, less the memory at the start.

    File pages, which the system can reclaim, do not count.
    """
    before, most, ended = _own_mib(), [0.0], Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], _own_mib())

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: max(most[0], _own_mib()) - before
    finally:
        ended.set()
        watcher.join()


def _rank(
    rank: int, ranks: int, store: str, function: Callable[..., object], arguments: tuple[object, ...], answers: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    answers.put((rank, function(*arguments)))
    dist.destroy_process_group()


def _own_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024
