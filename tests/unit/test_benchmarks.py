"""What a benchmark measures is what it says that it measures."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from streamppo.config import file as configfile
from streamppo.config.reward import FunctionScorer

sys.path.insert(0, str(REPOSITORY))

from benchmarks import throughput
from benchmarks.latency import LATENCY
from benchmarks.runs import Run


def commands(document: str, script: str) -> list[list[str]]:
    """The arguments of every such command in a document."""
    text = (REPOSITORY / document).read_text()
    return [shlex.split(found) for found in re.findall(rf"python benchmarks/{script}([^`\n]*)", text)]


@pytest.mark.parametrize("document", ["README.md", "docs/status.md"])
def test_the_throughput_commands_measure_the_lag_bound_and_the_reward_and_no_bound_of_their_own(document: str) -> None:
    found = commands(document, "throughput.py")
    assert found
    for arguments in found:
        options = throughput.parser().parse_args(arguments)
        options.set = [one for one in options.set if "gpus" not in one]
        for max_lag in options.max_lag:
            config = configfile.load(REPOSITORY / options.config, throughput.overrides(options, max_lag))
            admitted = (max_lag + 1) * config.queue.batch_size
            assert config.rollout.in_flight >= admitted
            scorer = config.reward.scorers["reward"]
            assert isinstance(scorer, FunctionScorer) and scorer.function == "benchmarks.latency:score"
            assert scorer.concurrency >= admitted


def test_runs_of_one_lag_bound_differ_in_what_the_reward_takes_and_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []
    nothing = Run(summary={}, updates=[], first_output_s=0.0, peak_memory_mib=0.0)

    def run(config: Path, overrides: list[str], environment: dict[str, str]) -> Run:
        asked.append((overrides, environment))
        return nothing

    monkeypatch.setattr(throughput, "run", run)
    monkeypatch.setattr(throughput, "_measure", lambda *_: {})
    for latency_s in (0.0, 1.0):
        throughput._run(throughput.parser().parse_args([]), 1, latency_s)
    (without, none), (with_latency, some) = asked
    assert without == with_latency
    assert (none, some) == ({LATENCY: "0.0"}, {LATENCY: "1.0"})
