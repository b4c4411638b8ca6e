"""A run's numbers in other programs: trackers and Prometheus.

    metrics.jsonl --follow.py--> points.py --> a tracker (trackers/) in a process of its own (process.py)
                                                 |
    driver: sinks.py starts it, looks at it      +--> runs/NAME/trackers/KIND.json: how far it has come

The file is the queue: a process that is slow, away or killed loses nothing, and sends the rest when the run is resumed.
The driver waits for none of them, but for `sinks.END_S` at its end.
"""
