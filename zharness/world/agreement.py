"""What ranks settle through their server: exchanges of values, and whether they call the same collectives."""

from __future__ import annotations

from dataclasses import dataclass

from zharness.world.messages import Announced, Vote, Votes


@dataclass(frozen=True)
class Mismatch:
    """Two ranks that call different collectives. ``at_ns`` is before anything that came of it: peers may even abort."""

    ranks: tuple[int, int]
    at_ns: int
    words: str


class Agreement:
    """The open exchange of one group, and the announced collectives that not every rank has reached."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._votes: dict[int, bytes] = {}
        self._announced: dict[int, dict[int, Announced]] = {}
        self.mismatch: Mismatch | None = None

    def voted(self, vote: Vote) -> Votes | None:
        """Every rank's value once the last is in."""
        self._votes[vote.rank] = vote.value
        if len(self._votes) < self._world_size:
            return None
        values = tuple(self._votes[rank] for rank in range(self._world_size))
        self._votes = {}
        return Votes(values)

    def abandon(self) -> tuple[int, ...]:
        """Give the open exchange up; the ranks that wait in it."""
        waiting = tuple(self._votes)
        self._votes = {}
        return waiting

    def announced(self, new: Announced) -> bool:
        """Whether ``new`` differs from what a peer announced under the same number; ``mismatch`` then has the words."""
        if self.mismatch:
            return False
        seen = self._announced.setdefault(new.ordinal, {})
        seen[new.rank] = new
        other = next((peer for peer in seen.values() if peer.what != new.what), None)
        if other is not None:
            first, second = sorted((other, new), key=lambda one: one.rank)
            words = (
                f"collective {new.ordinal} differs: rank {first.rank} calls {first.what} ({first.site}), "
                f"rank {second.rank} calls {second.what} ({second.site})"
            )
            self.mismatch = Mismatch((first.rank, second.rank), min(first.at_ns, second.at_ns), words)
            return True
        if len(seen) == self._world_size:
            del self._announced[new.ordinal]
        return False
