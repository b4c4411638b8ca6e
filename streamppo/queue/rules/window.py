"""The order in which complete units are taken: any ready unit, or only those in a window that starts at the oldest.

P units make a batch, S is the lag that admission aims at, W the window, L is max_lag. Pure, as in rules.py.

    mask, drop   all ready units, the oldest first: any number of units may overtake a slow one
    wait         W = 1: strict first in, first out
    windowed     W = (L - S) * P + 1: the window starts at the oldest held unit that is not ready and has W places in
                 the order of issue; units after the window wait until that unit is ready

Windowed is torchtitan's rule for RL (its docs/windowed_fifo.md), after MiniMax (https://arxiv.org/abs/2605.26494). Unit
n opens for an engine of version n // P - S or later. Before unit n is taken, all n older units and at most W - 1
younger ones are taken, so that it is in batch (n + W - 1) // P at the latest. The age of its tokens is at most

    S + ceil((W - 1) / P) = L

so that no token is too old and no unit is resampled for its age. The price: the learner waits for a slow unit, with
`wait` as soon as it is the oldest, with a window once W - 1 younger units have overtaken it.

S and W are derived from L. S is the greatest lag for which W - 1 is at least 3/10 of the (S + 1) * P held units, which
is MiniMax's share. L = 1 has room for either a flow lag or a window, and gets the flow lag: S = 1, W = 1. Example:

    L       2        4         8         16
    S       1        2         5         12
    W - 1   P        2 P       3 P       4 P
"""

from collections.abc import Iterator

from streamppo.queue.rules.slot import Unit
from streamppo.queue.rules.state import QueueSettings, QueueState


def units_in_window(settings: QueueSettings, state: QueueState) -> Iterator[Unit]:
    """The complete units that a batch may take, oldest first; the window also starts at a reopened unit."""
    window, oldest = settings.window, None
    for (number, _), unit in state.units.items():
        if window is not None and oldest is not None and number - oldest >= window * settings.unit_size:
            return
        if unit.missing == 0:
            yield unit
        if unit.missing and oldest is None:
            oldest = number
