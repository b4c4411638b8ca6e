"""Sends a run's metrics to other programs: trackers and Prometheus.

    metrics.jsonl --points.py--> a tracker (trackers/) in its own process (process.py)
                                                 |
    driver: sinks.py starts it, checks it        +--> runs/NAME/trackers/KIND.json: its progress

The file is the queue: a slow, stopped or killed process loses nothing and sends the rest when the run is resumed. The
driver never waits for a tracker, except for `sinks.END_S` at its end.
"""
