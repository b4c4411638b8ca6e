"""Sends a run's metrics to other programs: trackers and Prometheus.

    metrics.jsonl --points.py--> a tracker (trackers/) in its own process (process.py)
                                                 |
    driver: sinks.py starts it, checks it        +--> runs/NAME/trackers/KIND.json: its progress

metrics.jsonl is the queue between driver and tracker. A slow, stopped or killed tracker loses nothing: it sends the
missing lines after the run is resumed. The driver waits for trackers only at its end, at most `sinks.END_S` seconds.
"""
