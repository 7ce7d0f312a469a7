"""The runner that runs the cells of mutants."""

from __future__ import annotations

from zharness.engines import Capabilities
from zharness.mutants import MUTANTS, PATH
from zharness.run import Runner
from zharness.world import Isolation, RankServer


class MutantRunner(Runner):
    """A runner that uses one rank server for all mutants, and that reads the claims of mutants without building them.

    Mutants run one after the other in the same pooled ranks. This is safe because a mutant breaks only its own instance
    or restores on ``close`` the functions that it replaced, and because a rank in which a cell raised, hung or died is
    not used again.
    """

    def __init__(self, timeout: float = 60.0, seed: int = 0, isolation: Isolation = Isolation.POOLED) -> None:
        super().__init__({}, timeout, seed, isolation)
        self._shared_server = RankServer()
        self._servers = {mutant.engine: self._shared_server for mutant in MUTANTS.values()}

    def claims(self, engine: str, stage: int) -> Capabilities:
        """Return the capabilities that the mutant ``engine`` claims at ``stage``, without building the mutant."""
        return MUTANTS[engine.removeprefix(PATH)].claims(stage)

    def close(self) -> None:
        """Stop the rank server and the judge server."""
        self._shared_server.close()
        self._judge_server.close()
