"""Complete the exchanges of values between ranks, and detect ranks that call different collectives."""

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
    """A pair of ranks that called different collectives at the same point.

    ``at_ns`` is the time of the earlier of the two announcements. This time precedes every error that the mismatch
    causes in another rank.
    """

    ranks: tuple[int, int]
    at_ns: int
    message: str


class RankCoordinator:
    """Keeps the requests of the current exchange, and the collectives that some but not all ranks have announced."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._requests: dict[int, ExchangeRequest] = {}
        self._announcements: dict[int, dict[int, CollectiveAnnouncement]] = {}
        self.mismatch: MismatchedCollective | None = None

    @property
    def waiting_ranks(self) -> frozenset[int]:
        """The ranks that wait in the current exchange."""
        return frozenset(self._requests)

    def add_exchange_request(self, request: ExchangeRequest) -> dict[int, ExchangeAnswer]:
        """Add a rank's request, and return the answers to send, by rank.

        The answers are empty until the last rank's request arrives. If two ranks called different functions, the method
        immediately returns an ExchangeMismatch for every waiting rank and ends the exchange.
        """
        self._requests[request.rank] = request  # replaces the request of an interrupted exchange
        other = next((earlier for earlier in self._requests.values() if earlier.operation != request.operation), None)
        if other is not None:
            first, second = sorted((other, request), key=lambda request: request.rank)
            reason = describe_exchange_mismatch(
                (first.rank, first.operation, first.call_site), (second.rank, second.operation, second.call_site)
            )
            waiting, self._requests = self._requests, {}
            return {rank: ExchangeMismatch(request.ordinal, reason) for rank, request in waiting.items()}
        if len(self._requests) < self._world_size:
            return {}
        values = tuple(self._requests[rank].value for rank in range(self._world_size))
        waiting, self._requests = self._requests, {}
        return {rank: ExchangeResult(request.ordinal, values) for rank, request in waiting.items()}

    def abandon_exchange(self, reason: str) -> dict[int, ExchangeAnswer]:
        """End the current exchange without a result; return an ExchangeFailure for each rank that waits in it."""
        waiting, self._requests = self._requests, {}
        return {rank: ExchangeFailure(request.ordinal, reason) for rank, request in waiting.items()}

    def add_announcement(self, announcement: CollectiveAnnouncement) -> bool:
        """Add an announcement, and return whether another rank announced a different collective under the same number.

        If the collectives differ, the attribute ``mismatch`` describes the two ranks. Later mismatches are ignored.
        """
        if self.mismatch:
            return False
        same_ordinal = self._announcements.setdefault(announcement.ordinal, {})
        same_ordinal[announcement.rank] = announcement
        other = next((peer for peer in same_ordinal.values() if peer.operation != announcement.operation), None)
        if other is not None:
            first, second = sorted((other, announcement), key=lambda announced: announced.rank)
            calls = describe_calls(
                (first.rank, first.operation, first.call_site), (second.rank, second.operation, second.call_site)
            )
            message = f"collective calls differ between ranks at call {announcement.ordinal}: {calls}"
            self.mismatch = MismatchedCollective((first.rank, second.rank), min(first.at_ns, second.at_ns), message)
            return True
        if len(same_ordinal) == self._world_size:
            del self._announcements[announcement.ordinal]
        return False


def describe_exchange_mismatch(first: tuple[int, str, str], second: tuple[int, str, str]) -> str:
    """Return the message for two ranks whose calls differ; each call is given as (rank, function, call site)."""
    return f"calls that exchange values differ between ranks: {describe_calls(first, second)}"


def describe_calls(*calls: tuple[int, str, str]) -> str:
    """Describe calls, given as (rank, function, call site): ``rank 0 calls exchange (test_x.py, line 7), ...``."""
    return ", ".join(f"rank {rank} calls {operation} ({call_site})" for rank, operation, call_site in calls)
