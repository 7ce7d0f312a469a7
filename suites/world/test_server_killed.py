"""If the rank server is killed, as by the kernel's out-of-memory killer, only the running test fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.world.faults.sessions import run

SOURCE = """
    import os, signal
    import pytest

    pytestmark = pytest.mark.world_size(2)

    @pytest.fixture(scope="module")
    def module_fixture(rank):
        yield rank

    def test_before(module_fixture): pass

    def test_kills(rank):
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    def test_after(module_fixture, rank): assert module_fixture == rank
"""


@pytest.mark.parametrize("mode", ["fresh", "pooled"])
def test_only_the_test_that_lost_its_server_fails_with_that_cause(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, SOURCE, f"--isolation={mode}", "-p", "no:xdist")
    assert done.verdicts() == {
        "test_before[w2]": "passed",
        "test_kills[w2]": "setup failed",
        "test_after[w2]": "passed",
    }
    assert "the rank server ended with status -9" in done.tests["test_kills[w2]"].reports[0].text
    assert not done.leftovers
