"""When Python looks for reference cycles in processes that hold thousands of living objects.

A trajectory that waits a second for its reward survives the cheap passes, and so Python makes a full one every second:
it walks every object there is, 0.3 s beside torch and transformers, and nothing else happens meanwhile. Nothing that a
trajectory consists of makes cycles.
"""

import gc

MORE_OBJECTS = 200_000
"""A pass comes when so many objects more are alive than at the last one: tens of MiB that cycles may hold."""


def collect_rarely() -> None:
    """To be called when everything is loaded: that is never walked again, and the rest not before it grows."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MORE_OBJECTS)
