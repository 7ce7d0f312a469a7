"""What ranks settle through their server: exchanges of values, and whether they call the same collectives."""

from __future__ import annotations

from dataclasses import dataclass

from zharness.world.messages import Announced, Answer, Apart, NoVotes, Vote, Votes


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
        self._votes: dict[int, Vote] = {}
        self._announced: dict[int, dict[int, Announced]] = {}
        self.mismatch: Mismatch | None = None

    def voted(self, vote: Vote) -> dict[int, Answer]:
        """What to answer to which ranks: every rank's value once the last is in, nothing before.

        Ranks that meet in different functions learn that at once: neither could read the other's value.
        """
        self._votes[vote.rank] = vote  # instead of one that it gave before, and left by an exception
        other = next((earlier for earlier in self._votes.values() if earlier.what != vote.what), None)
        if other is not None:
            first, second = sorted((other, vote), key=lambda one: one.rank)
            words = apart((first.rank, first.what, first.site), (second.rank, second.what, second.site))
            waiting, self._votes = self._votes, {}
            return {rank: Apart(each.ordinal, words) for rank, each in waiting.items()}
        if len(self._votes) < self._world_size:
            return {}
        values = tuple(self._votes[rank].value for rank in range(self._world_size))
        waiting, self._votes = self._votes, {}
        return {rank: Votes(each.ordinal, values) for rank, each in waiting.items()}

    def abandon(self, reason: str) -> dict[int, Answer]:
        """Give the open exchange up: what to answer to the ranks that wait in it."""
        waiting, self._votes = self._votes, {}
        return {rank: NoVotes(vote.ordinal, reason) for rank, vote in waiting.items()}

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


def apart(first: tuple[int, str, str], second: tuple[int, str, str]) -> str:
    """Ranks that meet in different functions, each as rank, function and site, in words."""
    told = ", ".join(f"rank {rank} calls {what} ({site})" for rank, what, site in (first, second))
    return f"the ranks are not at the same place: {told}"
