"""pytest's fixtures, options and plugins work on ranks as they do without ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from suites.world.faults.sessions import Session, SessionResult, run
from suites.world.life import LIFE, LIFE_ALONE, ON_FOUR_TOO, OPTIONS, REPORT_PATTERNS, VERDICTS

MODES = ("fresh", "pooled")
# Sessions whose xdist workers are new processes, as from a shell; those of the others are forks of the warm Python.
STARTED = ("fresh -n 2", "workers")


def side_by_side(
    folder: Path, sessions: Mapping[str, tuple[str | Mapping[str, str], tuple[str, ...]]]
) -> dict[str, SessionResult]:
    """Run all sessions at the same time; return their results by name."""
    started = {}
    for name, (source, arguments) in sessions.items():
        files = {"test_it.py": source} if isinstance(source, str) else source
        spares = 2 if "-n" in arguments and name not in STARTED else 0
        started[name] = Session(folder / re.sub(r"\W+", "-", name), files, *arguments, spares=spares)
    return {name: session.finish() for name, session in started.items()}


def test_every_feature_of_pytest_gives_the_same_verdicts_in_both_modes(tmp_path: Path) -> None:
    files = {"test_it.py": LIFE, "test_more.py": LIFE_ALONE}
    done = side_by_side(tmp_path, {mode: (files, (f"--isolation={mode}", "-p", "no:xdist")) for mode in MODES})
    expected = {f"{name}{size}": verdict for name, verdict in VERDICTS.items() for size in world_size_ids(name)}
    for mode in MODES:
        assert done[mode].verdicts() == expected, f"{mode}: {done[mode].output}"
        for name, patterns in REPORT_PATTERNS.items():
            for size in world_size_ids(name):
                text = "\n".join(report.text for report in done[mode].tests[f"{name}{size}"].reports)
                missing = [pattern for pattern in patterns if not re.search(pattern, text)]
                assert not missing, f"{mode}, {name}{size}: {text}"
        assert not done[mode].leftovers


def world_size_ids(name: str) -> tuple[str, ...]:
    """Return the ids of a test's world sizes, each followed by the test's own parameters."""
    if name.endswith("_alone"):
        return ("",)
    if name == "test_parametrized":
        return ("[w2-1-closure]", "[w2-2-closure]")
    return ("[w2]", "[w4]") if name in ON_FOUR_TOO else ("[w2]",)


def test_a_world_size_is_part_of_the_id_and_collecting_tests_forks_no_server(tmp_path: Path) -> None:
    source = """
        import os
        from pathlib import Path
        import pytest

        os.register_at_fork(before=lambda: Path(__file__).with_name("forked").touch())

        @pytest.mark.parametrize("x", ["a", "b"])
        @pytest.mark.world_size(2, 4)
        def test_it(x):
            pass
    """
    sessions = {
        "listed": (source, ("--collect-only", "-q")),
        "chosen": (source, ("-k", "w2", "-p", "no:xdist")),
    }
    done = side_by_side(tmp_path, sessions)
    listed = re.findall(r"test_it\[.*\]", done["listed"].output)
    assert sorted(listed) == ["test_it[w2-a]", "test_it[w2-b]", "test_it[w4-a]", "test_it[w4-b]"]
    assert not (tmp_path / "listed" / "forked").exists()
    assert done["chosen"].verdicts() == {"test_it[w2-a]": "passed", "test_it[w2-b]": "passed"}
    assert (tmp_path / "chosen" / "forked").exists()


ONCE = """
    import json, os
    from pathlib import Path
    import pytest

    def log(*what):
        with open(Path(__file__).parent / "notes" / "log", "a") as file:
            file.write(json.dumps([os.getpid(), *what]) + "\\n")

    @pytest.fixture(scope="session")
    def wide():
        log(f"{__name__}, session", "up")
        yield
        log(f"{__name__}, session", "down")

    @pytest.fixture(scope="module")
    def thing(wide):
        log(__name__, "up")
        yield os.getpid()
        log(__name__, "down")

    def test_plain(thing):
        assert thing == os.getpid()

    @pytest.mark.world_size(2)
    def test_two(thing):
        assert thing == os.getpid()

    @pytest.mark.world_size(4)
    def test_four(thing):
        assert thing == os.getpid()

    @pytest.mark.world_size(2)
    def test_two_again(thing):
        assert thing == os.getpid()

    def test_plain_again(thing):
        assert thing == os.getpid()

    @pytest.mark.world_size(4)
    def test_four_again(thing):
        assert thing == os.getpid()
"""
FAILS = """
    def test_last(thing):
        assert not thing
"""


def test_session_and_module_fixtures_are_set_up_and_torn_down_once_per_process(tmp_path: Path) -> None:
    two = {"test_it.py": ONCE, "test_more.py": ONCE}
    stopped = {"test_it.py": ONCE + FAILS, "test_more.py": ONCE}
    sessions = {
        "fresh": (two, ("-p", "no:xdist")),
        "pooled": (two, ("-p", "no:xdist", "--isolation=pooled")),
        "pooled -x": (stopped, ("-p", "no:xdist", "--isolation=pooled", "-x")),
        "pooled -n 2": (two, ("-n", "2", "--isolation=pooled")),
        "fresh -n 2": (two, ("-n", "2")),
    }
    done = side_by_side(tmp_path, sessions)
    wrong = []
    for name, session in done.items():
        expected = "call failed" if name == "pooled -x" else "passed"
        if set(session.verdicts().values()) != {"passed", expected} or session.leftovers:
            wrong.append(f"{name}: {session.verdicts()} {session.leftovers}")
        log = tmp_path / re.sub(r"\W+", "-", name) / "notes" / "log"
        events: dict[tuple[int, str], list[str]] = {}
        for pid, scope, event in map(json.loads, log.read_text().splitlines()):
            events.setdefault((pid, scope), []).append(event)
        wrong += [f"{name}: {scope}: {seen}" for scope, seen in events.items() if seen != ["up", "down"]]
        if name == "pooled" and len(events) != (1 + 2 + 4) * 4:
            wrong.append(f"{name}: {len(events)} set-ups, expected two fixtures of two modules in 7 processes")
    assert not wrong, "\n".join(wrong)


SAME = {
    "test_passes[w2]": "passed",
    "test_warns[w2]": "passed",
    "test_fails[w2]": "call failed",
    "test_plain": "passed",
    "test_skips[w2]": "call skipped",
    "test_plain_fails": "call failed",
}


@pytest.mark.exhaustive
def test_options_and_other_plugins_change_no_verdict(tmp_path: Path) -> None:
    variants = {
        "no xdist": ("-p", "no:xdist", "-s", "--junitxml=junit.xml", "-o", "junit_family=legacy"),
        "workers": ("-n", "2"),
        "groups": ("-n", "2", "--dist", "loadgroup", "--isolation=pooled"),
        "forked": ("--forked",),
        "forked pooled": ("--forked", "--isolation=pooled"),
        "pooled": ("--isolation=pooled", "-s"),
        "first": ("-x",),
        "two": ("--maxfail=2", "--isolation=pooled"),
    }
    done = side_by_side(tmp_path, {name: (OPTIONS, arguments) for name, arguments in variants.items()})
    for name, session in done.items():
        expected = dict(list(SAME.items())[: 3 if name == "first" else None])
        assert session.verdicts() == expected, f"{name}: {session.output}"
        assert session.status == 1, name
        assert not session.leftovers, name
        assert "planted warning" in session.output, name
        assert ", 1 warning in" in session.output, f"{name}: {session.output}"
    for name in ("no xdist", "pooled"):
        assert re.search(r"\[rank 1\] hello from 1$", done[name].output, re.MULTILINE), name
    properties = {
        element.get("name"): element.get("value")
        for element in ElementTree.parse(tmp_path / "no-xdist" / "junit.xml").iter("property")  # noqa: S314 - our own
    }
    assert properties == {"world": "2", "number[rank 0]": "0", "number[rank 1]": "1"}


@pytest.mark.parametrize("mode", MODES)
def test_last_failed_runs_what_failed_in_ranks(mode: str, tmp_path: Path) -> None:
    run(tmp_path, OPTIONS, f"--isolation={mode}", "-p", "no:xdist")
    again = run(tmp_path, OPTIONS, f"--isolation={mode}", "-p", "no:xdist", "--lf")
    assert again.verdicts() == {name: verdict for name, verdict in SAME.items() if "failed" in verdict}


def write_marked_test(marker: str, body: str = "pass") -> str:
    """Return a module with a healthy test and one that has ``marker``."""
    return f"""
        import pytest

        @pytest.mark.world_size(2)
        def test_before():
            pass

        @pytest.mark.{marker}
        {"" if "world_size" in marker else "@pytest.mark.world_size(2)"}
        def test_wrong():
            {body}
    """.replace("\n        \n", "\n")


def test_a_wrong_marker_gives_one_clear_error(tmp_path: Path) -> None:
    expected = {
        "world_size()": r"world_size\(\): expected one or more different integers above 0",
        "world_size(0)": r"world_size\(0\): expected one or more different integers above 0",
        'world_size("2")': r"world_size\('2'\): expected one or more different integers above 0",
        "world_size(2, 2)": r"world_size\(2, 2\): expected one or more different integers above 0",
        'isolation("x")': r"test_wrong\[w2\].*isolation.*'x'.*expected one of \['fresh', 'pooled'\]",
        "rank_timeout(-1)": r"test_wrong\[w2\].*rank_timeout\(.*-1.*expected one number of seconds above 0",
        'collectives("x")': r"test_wrong\[w2\].*collectives.*'x'.*expected one of \['checked', 'trusted'\]",
        "world_size(100_000)": r"test_wrong\[w100000\].*world size 100000 cannot be started here; allowed: 1 to",
    }
    done = side_by_side(tmp_path, {marker: (write_marked_test(marker), ("-p", "no:xdist")) for marker in expected})
    for marker, pattern in expected.items():
        assert re.search(pattern, done[marker].output), f"{marker}: {done[marker].output}"
        assert done[marker].status in (2, 4), f"{marker}: {done[marker].output}"
        assert "Traceback" not in done[marker].output, f"{marker}: {done[marker].output}"
        assert "INTERNALERROR" not in done[marker].output, f"{marker}: {done[marker].output}"
        assert not done[marker].verdicts(), f"{marker}: no test has run"


def test_a_process_in_which_cuda_is_initialised_is_refused_with_the_file_that_did_it(tmp_path: Path) -> None:
    culprit = """
        import torch

        torch.cuda._initialized = True

        def test_plain():
            pass
    """
    files = {
        "test_a.py": write_marked_test("rank_timeout(5)"),
        "test_culprit.py": culprit,
        "test_z.py": "def test_z(): pass",
    }
    done = run(tmp_path, files, "-p", "no:xdist")
    assert done.status == 4, done.output
    assert re.search("CUDA .* initialised", done.output), done.output
    assert "test_culprit.py" in done.output, done.output
    assert not done.verdicts()


def test_torch_threads_used_while_importing_a_test_module_do_not_make_ranks_hang(tmp_path: Path) -> None:
    source = """
        import pytest, torch

        torch.set_num_threads(4)
        square = torch.ones(1500, 1500) @ torch.ones(1500, 1500)

        @pytest.mark.rank_timeout(30)
        @pytest.mark.world_size(2)
        def test_multiplies():
            assert torch.equal(torch.ones(1500, 1500) @ torch.ones(1500, 1500), square)
            torch.ones(1 << 20, requires_grad=True).exp().sum().backward()
    """
    done = side_by_side(tmp_path, {mode: (source, ("-p", "no:xdist", f"--isolation={mode}")) for mode in MODES})
    for mode in MODES:
        assert done[mode].verdicts() == {"test_multiplies[w2]": "passed"}, done[mode].output
