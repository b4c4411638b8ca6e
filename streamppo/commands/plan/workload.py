"""The workload of a simulated run, and the costs of its stages."""

from collections.abc import Sequence
from typing import NamedTuple

from streamppo.queue.rules.state import QueueSettings


class StageCosts(NamedTuple):
    """Seconds of work on a core or GPU. `reward_s` is a wait without work.

    engine     a step: `step_s` + `row_s` for each row + `cached_s` for each token in its cache; a prefill: `prefill_s`
               + `prompt_s` for each prompt; `swap_s` for a version
    actor      `sample_s` for a trajectory: its prompt, reward and delivery; `actor_cores` are always busy
    queue      `call_s` for a call, `stored_s` for a trajectory in it, `publish_s` for a version
    rank       an update: `update_s` + `token_s` for each token of its rows + `sync_s` if there are other ranks;
               `push_s` during the next update
    """

    step_s: float
    row_s: float
    cached_s: float
    prefill_s: float
    prompt_s: float
    swap_s: float
    sample_s: float
    reward_s: float
    call_s: float
    stored_s: float
    publish_s: float
    update_s: float
    token_s: float
    sync_s: float
    push_s: float
    actor_cores: float = 0.0


class Workload(NamedTuple):
    """The settings of a simulated run. `lengths` are the tokens of completions, in the order of sampling.

    All stages share `cores`. If `cores` is None, engines and ranks have GPUs. A rank's work is divided among `threads`.
    """

    settings: QueueSettings
    actors: int
    in_flight: int
    slots: int
    ranks: int
    prompt_tokens: float
    lengths: Sequence[int]
    evaluation_every: int = 0
    evaluation_prompts: int = 0
    cores: float | None = None
    threads: int = 1
