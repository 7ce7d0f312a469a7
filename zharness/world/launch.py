"""Detect whether torchrun started this process, and which rank the process is."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from zharness.errors import UsageError

# Children of a rank inherit torchrun's variables but are not that rank: this variable has the process id of the rank.
_OWNER_VARIABLE = "ZHARNESS_ATTACHED"
_NUMERIC_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One rank of a torchrun launch, as torchrun's environment variables describe it.

    ``address`` and ``port`` are those of the launch's key-value store. ``restart_count`` is the number of times that
    torchrun has restarted all ranks. ``uses_agent_store`` is True if torchrun's agent runs the server of the store, and
    False if rank 0 has to run that server.
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
        """Return whether one torchrun agent, and so one machine, runs all ranks."""
        return self.local_world_size == self.world_size

    def describe(self) -> str:
        """Describe the launch by its ranks and by the agents (torchrun processes) that started them."""
        machines = -(-self.world_size // self.local_world_size)
        where = "on this machine" if machines == 1 else f"by {machines} agents"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} that torchrun started {where}"


def detect_launch(environment: MutableMapping[str, str] | None = None) -> Launch | None:
    """Return this process's rank in a torchrun launch; None if torchrun did not start this process.

    The first process that calls this function is the rank, and its process id is recorded in ``environment``. Every
    process that the rank starts (pytest in a test, an xdist worker, a forked rank) inherits this record, so the
    function returns None in it. Raises UsageError if some of torchrun's variables are missing or not numbers.
    """
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    wrong = [
        f"{name}={environment.get(name)!r}" for name in _NUMERIC_VARIABLES if not environment.get(name, "").isdecimal()
    ]
    if wrong or not environment.get("MASTER_ADDR"):
        raise UsageError(
            "TORCHELASTIC_RUN_ID and RANK are set, but other variables of torchrun are missing or wrong: "
            f"{', '.join(wrong) or 'no MASTER_ADDR'}; unset TORCHELASTIC_RUN_ID to run without torchrun's ranks"
        )
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    claim = f"{environment['TORCHELASTIC_RUN_ID']}@{address}:{port} by "
    owner = environment.get(_OWNER_VARIABLE, "")
    if owner.startswith(claim) and owner != f"{claim}{os.getpid()}":
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
    """Return the world size of the torchrun launch, or 2 if torchrun did not start this process."""
    launch = detect_launch()
    return 2 if launch is None else launch.world_size
