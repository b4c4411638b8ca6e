"""Hands over the segments of one ticket's completion before its end, each once and in order.

The engine cuts completions that are being sampled; `cut_waiting` cuts a completion that waits for a reward or an
environment. All segments except the last are trajectories with `finish` "cut" and no reward.
"""

from collections.abc import Callable

from msgspec import structs

from streamppo.config.sections import Config
from streamppo.rollout.engine import Completion, Cuts
from streamppo.rollout.episode import Episode
from streamppo.rollout.segment_cuts import newest_version_start
from streamppo.types import Ints, Reward, Ticket, Trajectory


class SegmentWriter:
    """Makes a completion's segments; the next has `identity`, after `prefix` tokens. `share`, `aim`: see `Cuts`."""

    def __init__(
        self,
        ticket: Ticket,
        actor: str,
        config: Config,
        hand_over: Callable[[Trajectory], None],
        *,
        share: float,
        aim: Callable[[], int] = int,
    ) -> None:
        self.identity, self.prefix = ticket.identity, 0
        self._actor, self._config, self._hand_over = actor, config, hand_over
        self._share, self._aim = share, aim
        self._waiting: Episode | None = None

    def cuts(self, so_far: Callable[[Completion], Episode], before: Ints) -> Cuts | None:
        """Return the cuts of the next turn, or None. `so_far` joins it to the episode, whose versions are `before`."""
        queue, waiting, self._waiting = self._config.queue, before[self.prefix :], None
        if queue.segments is None:
            return None
        return Cuts(
            take=lambda sampled: self._write_cut(so_far(sampled)),
            max_tokens=queue.segments.max_tokens,
            max_age=queue.cut_age,
            share=self._share,
            aim=self._aim,
            oldest=int(waiting.min()) if len(waiting) else None,
        )

    def wait(self, episode: Episode) -> None:
        self._waiting = episode

    def cut_waiting(self, version: int) -> int | None:
        """Cut the waiting episode if due at `version`; return its rest's oldest version, or None without an episode."""
        queue, episode = self._config.queue, self._waiting
        if episode is None or queue.segments is None:
            return None
        keep = newest_version_start(episode.versions)
        if keep > self.prefix and version - episode.versions[self.prefix] >= queue.cut_age:
            self._write_cut(episode.until(keep))
        return int(episode.versions[self.prefix])

    def _write_cut(self, episode: Episode) -> None:
        segment = episode.trajectory(self.identity, self._actor, Reward(), prefix=self.prefix)
        self.prefix = len(episode.tokens)
        self.identity = structs.replace(self.identity, segment=self.identity.segment + 1)
        self._hand_over(segment)
