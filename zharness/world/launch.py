"""What a launcher has made of this process: one of the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from zharness.errors import UsageError

# Every process below this one inherits what the launcher set, and is not the rank that it describes.
_OWNER_VARIABLE = "ZHARNESS_ATTACHED"
_NUMERIC_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One rank as its launcher describes it. ``agent_store`` says that the launcher's agent keeps the store.

    ``attempt`` counts the launcher's restarts of all ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    restart_count: int = 0
    uses_agent_store: bool = True

    @property
    def is_single_machine(self) -> bool:
        """Whether all ranks run under the same agent."""
        return self.local_world_size == self.world_size

    def describe(self) -> str:
        """``4 ranks that torchrun started on 2 machines``."""
        machines = -(-self.world_size // self.local_world_size)
        where = "on this machine" if machines == 1 else f"by {machines} agents"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} that torchrun started {where}"


def detect_launch(environment: MutableMapping[str, str] | None = None) -> Launch | None:
    """The rank that torchrun made of this process; None for any other process.

    The first process to ask is the rank. Whatever it starts (a pytest in a test, workers of xdist, ranks of our own)
    inherits its environment and gets None. Raises UsageError for variables that are there and make no sense.
    """
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    wrong = [
        f"{name}={environment.get(name)!r}" for name in _NUMERIC_VARIABLES if not environment.get(name, "").isdecimal()
    ]
    if wrong or not environment.get("MASTER_ADDR"):
        raise UsageError(
            f"torchrun's variables are there, but not all as torchrun sets them: {', '.join(wrong) or 'no MASTER_ADDR'}"
            "; unset TORCHELASTIC_RUN_ID to run without its ranks"
        )
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    claim = f"{environment['TORCHELASTIC_RUN_ID']}@{address}:{port} by "
    held = environment.get(_OWNER_VARIABLE, "")
    if held.startswith(claim) and held != f"{claim}{os.getpid()}":
        return None
    environment[_OWNER_VARIABLE] = f"{claim}{os.getpid()}"
    return Launch(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
        address=address,
        port=port,
        restart_count=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        uses_agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def default_world_size() -> int:
    """The world size where none is asked for: that of the launch, else the smallest in which anything is sharded."""
    launch = detect_launch()
    return 2 if launch is None else launch.world_size
