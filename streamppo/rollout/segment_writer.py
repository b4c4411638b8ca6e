"""The segments of one ticket's completion: handed over before it has ended, each once, in their order.

The engine cuts what is being sampled, and `cut_waiting` cuts what waits for a reward or an environment. All but the
last are trajectories with `finish` "cut" and no reward. The last one is made when the whole is scored.
"""

from collections.abc import Callable

from msgspec import structs

from streamppo.config.sections import Config
from streamppo.rollout.engine import Completion, Cuts
from streamppo.rollout.episode import Episode
from streamppo.rollout.segment_cuts import kept_from
from streamppo.types import Ints, Reward, Ticket, Trajectory


class SegmentWriter:
    """Makes trajectories of what is sampled of a ticket; without segments in `config`, none before the end.

    `identity` is that of the segment to come, and `prefix` are the tokens before it, which were handed over. `share`
    are the segments of a batch that this actor makes; `aim` gives the age from which they are cut if there is room.
    """

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
        """Say where the engine is to cut the turn that comes; None for nowhere.

        `so_far` adds the turn, as far as it is sampled, to the episode; `before` are the versions of its tokens before.
        """
        queue, waiting, self._waiting = self._config.queue, before[self.prefix :], None
        if queue.segments is None:
            return None
        return Cuts(
            take=lambda sampled: self._write_cut(so_far(sampled)),
            max_tokens=queue.segments.max_tokens,
            max_age=queue.cut_age if queue.segments.just_in_time else 0,
            share=self._share,
            aim=self._aim,
            oldest=int(waiting.min()) if len(waiting) else None,
        )

    def wait(self, episode: Episode) -> None:
        """Note that `episode` waits for a reward or an environment, and nothing of it is sampled."""
        self._waiting = episode

    def cut_waiting(self, version: int) -> int | None:
        """Hand over what is due at `version`; returns the oldest version of what it keeps, None if nothing waits."""
        queue, episode = self._config.queue, self._waiting
        if episode is None or queue.segments is None or not queue.segments.just_in_time:
            return None
        keep = kept_from(episode.versions)
        if keep > self.prefix and version - episode.versions[self.prefix] >= queue.cut_age:
            self._write_cut(episode.until(keep))
        return int(episode.versions[self.prefix])

    def _write_cut(self, episode: Episode) -> None:
        segment = episode.trajectory(self.identity, self._actor, Reward(), prefix=self.prefix)
        self.prefix = len(episode.tokens)
        self.identity = structs.replace(self.identity, segment=self.identity.segment + 1)
        self._hand_over(segment)
