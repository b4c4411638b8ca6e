"""The segments of one ticket's completion: handed over while it is sampled, each once, in their order.

All but the last are trajectories with `finish` "cut" and no reward. The last one is made when the whole is scored.
"""

from collections.abc import Callable

from msgspec import structs

from streamppo.config.sections import Config
from streamppo.rollout.engine import Completion, Cuts
from streamppo.rollout.episode import Episode
from streamppo.types import Ints, Reward, Ticket, Trajectory


class Handing:
    """Makes trajectories of what is sampled of a ticket; without segments in `config`, none before the end.

    `identity` is that of the segment to come, and `prefix` are the tokens before it, which were handed over.
    """

    def __init__(self, ticket: Ticket, actor: str, config: Config, hand_over: Callable[[Trajectory], None]) -> None:
        self.identity, self.prefix = ticket.identity, 0
        self._actor, self._config, self._hand_over = actor, config, hand_over

    def cuts(self, so_far: Callable[[Completion], Episode], before: Ints) -> Cuts | None:
        """Say where the engine is to cut the turn that comes; None for nowhere.

        `so_far` adds the turn, as far as it is sampled, to the episode; `before` are the versions of its tokens before.
        """
        queue, waiting = self._config.queue, before[self.prefix :]
        if queue.segments is None:
            return None
        return Cuts(
            take=lambda sampled: self._cut(so_far(sampled)),
            max_tokens=queue.segments.max_tokens,
            max_age=queue.cut_age if queue.segments.just_in_time else 0,
            share=queue.batch_size / self._config.rollout.actors,
            oldest=int(waiting.min()) if len(waiting) else None,
        )

    def _cut(self, episode: Episode) -> None:
        segment = episode.trajectory(self.identity, self._actor, Reward(), prefix=self.prefix)
        self.prefix = len(episode.tokens)
        self.identity = structs.replace(self.identity, segment=self.identity.segment + 1)
        self._hand_over(segment)
