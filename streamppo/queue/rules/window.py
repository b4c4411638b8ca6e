"""The order in which whole completions are taken: all that is ready, or no further than a window behind the oldest.

P units make a batch, S is the lag that admission aims at, W the window, L is max_lag. Pure, as in rules.py.

    mask, drop   all units that are ready, the oldest first: a slow one is passed by any number of others
    wait         W = 1: strict first in, first out
    windowed     W = (L - S) * P + 1: the window begins with the oldest unit that is held, and is W places of the order
                 of issue; a unit behind it waits until the oldest is taken

Windowed is torchtitan's rule for RL (its docs/windowed_fifo.md), after MiniMax (https://arxiv.org/abs/2605.26494). Unit
n opens for an engine of version n // P - S or later. Before it is taken, all n older ones and at most W - 1 younger
ones are, so that it is in batch (n + W - 1) // P at the latest. The age of its tokens is at most

    S + ceil((W - 1) / P) = L

so that nothing is too old, and nothing is sampled again for its age. The price is that the learner waits for a slow
unit: with `wait` as soon as it is the oldest, with a window once W - 1 younger ones have passed it.

S and W are derived of L. S is the greatest for which W - 1 is at least 3/10 of the (S + 1) * P units that are held,
which is MiniMax's share; L = 1 has room for a flow or a window, and has the flow: S = 1, W = 1. By example:

    L       2        4         8         16
    S       1        2         5         12
    W - 1   P        2 P       3 P       4 P
"""

from collections.abc import Iterator

from streamppo.queue.rules.slot import Unit
from streamppo.queue.rules.state import QueueSettings, QueueState


def units_in_window(settings: QueueSettings, state: QueueState) -> Iterator[Unit]:
    """The whole units that a batch may take, the oldest first; the window stays at one that is opened again."""
    window, oldest = settings.window, None
    for (number, _), unit in state.units.items():
        if window is not None and oldest is not None and number - oldest >= window * settings.unit_size:
            return
        if unit.missing == 0:
            yield unit
        if unit.missing and oldest is None:
            oldest = number
