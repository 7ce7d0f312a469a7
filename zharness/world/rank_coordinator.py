"""What ranks settle through their server: exchanges of values, and whether they call the same collectives."""

from __future__ import annotations

from dataclasses import dataclass

from zharness.world.messages import (
    CollectiveAnnouncement,
    ExchangeAnswer,
    ExchangeFailure,
    ExchangeMismatch,
    ExchangeRequest,
    ExchangeResult,
)


@dataclass(frozen=True)
class MismatchedCollective:
    """Two ranks that call different collectives. ``at_ns`` is before anything that came of it: peers may even abort."""

    ranks: tuple[int, int]
    at_ns: int
    message: str


class RankCoordinator:
    """The open exchange of one group, and the announced collectives that not every rank has reached."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._requests: dict[int, ExchangeRequest] = {}
        self._announcements: dict[int, dict[int, CollectiveAnnouncement]] = {}
        self.mismatch: MismatchedCollective | None = None

    def add_exchange_request(self, request: ExchangeRequest) -> dict[int, ExchangeAnswer]:
        """What to answer to which ranks: every rank's value once the last is in, nothing before.

        Ranks that meet in different functions learn that at once: neither could read the other's value.
        """
        self._requests[request.rank] = request  # instead of one that it gave before, and left by an exception
        other = next((earlier for earlier in self._requests.values() if earlier.operation != request.operation), None)
        if other is not None:
            first, second = sorted((other, request), key=lambda one: one.rank)
            words = describe_exchange_mismatch(
                (first.rank, first.operation, first.call_site), (second.rank, second.operation, second.call_site)
            )
            waiting, self._requests = self._requests, {}
            return {rank: ExchangeMismatch(each.ordinal, words) for rank, each in waiting.items()}
        if len(self._requests) < self._world_size:
            return {}
        values = tuple(self._requests[rank].value for rank in range(self._world_size))
        waiting, self._requests = self._requests, {}
        return {rank: ExchangeResult(each.ordinal, values) for rank, each in waiting.items()}

    def abandon_exchange(self, reason: str) -> dict[int, ExchangeAnswer]:
        """Give the open exchange up: what to answer to the ranks that wait in it."""
        waiting, self._requests = self._requests, {}
        return {rank: ExchangeFailure(vote.ordinal, reason) for rank, vote in waiting.items()}

    def add_announcement(self, announcement: CollectiveAnnouncement) -> bool:
        """Whether ``new`` differs from what a peer announced under the same number; ``mismatch`` then has the words."""
        if self.mismatch:
            return False
        seen = self._announcements.setdefault(announcement.ordinal, {})
        seen[announcement.rank] = announcement
        other = next((peer for peer in seen.values() if peer.operation != announcement.operation), None)
        if other is not None:
            first, second = sorted((other, announcement), key=lambda one: one.rank)
            words = (
                f"collective {announcement.ordinal} differs: rank {first.rank} calls {first.operation} ({first.call_site}), "
                f"rank {second.rank} calls {second.operation} ({second.call_site})"
            )
            self.mismatch = MismatchedCollective((first.rank, second.rank), min(first.at_ns, second.at_ns), words)
            return True
        if len(seen) == self._world_size:
            del self._announcements[announcement.ordinal]
        return False


def describe_exchange_mismatch(first: tuple[int, str, str], second: tuple[int, str, str]) -> str:
    """Ranks that meet in different functions, each as rank, function and site, in words."""
    told = ", ".join(f"rank {rank} calls {what} ({site})" for rank, what, site in (first, second))
    return f"the ranks are not at the same place: {told}"
