"""Plots of benchmarks: axes in a row in one file. Needs matplotlib (`pip install streamppo[plots]`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def by_lengths(path: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, str, list[Mapping[str, Any]]]]:
    """Yield (axes, name, rows) for each shape of lengths, and write `path` after the last one."""
    shapes = list(dict.fromkeys(row["lengths"] for row in rows))
    with axes(path, len(shapes)) as made:
        for axis, shape in zip(made, shapes, strict=True):
            yield axis, shape, [row for row in rows if row["lengths"] == shape]


@contextmanager
def axes(path: Path, count: int, *, width: float = 5, height: float = 4, **shared: Any) -> Iterator[Any]:
    """Yield `count` axes in a row, each of `width` times `height` inches, and write `path` after the block."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, made = pyplot.subplots(1, count, figsize=(width * count, height), squeeze=False, **shared)
    yield made[0]
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
