"""DistributedFixture runs on ranks of its own before the test, which finds the files that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.compat.session_runs import SessionRun, run

DIRECTORIES = """
def files_in(directory):
    return sorted(path.name for path in Path(directory).iterdir())


class _saved(DistributedFixture):
    world_size = None

    def run(self, class_tmpdir, tmpdir, number):
        for directory in (class_tmpdir, tmpdir):
            Path(directory, f"rank{dist.get_rank()}of{self.world_size}").write_text(str(number))


class saved_by_4(_saved):
    world_size = 4


class saved_by_3(_saved):
    world_size = 3


@pytest.fixture
def loaded(saved_by_4, class_tmpdir):
    return Path(class_tmpdir, "rank3of4").read_text()


@pytest.fixture
def called(request):
    saved_by_3()(request)


@pytest.fixture
def behind_a_call(called, tmpdir):
    return files_in(tmpdir)


@pytest.mark.parametrize("number", [7, 8])
class TestDirectories(DistributedTest):
    world_size = 2

    def test_of_a_fixture(self, saved_by_4, tmpdir, class_tmpdir, number):
        for directory in (tmpdir, class_tmpdir):
            text = [Path(directory, f"rank{rank}of4").read_text() for rank in range(4)]
            assert text == [str(number)] * 4
        assert files_in(tmpdir) == [f"rank{rank}of4" for rank in range(4)]

    def test_of_a_fixture_behind_a_fixture(self, loaded, number):
        assert loaded == str(number)

    def test_of_a_fixture_that_calls_the_class(self, behind_a_call, number):
        assert behind_a_call == [f"rank{rank}of3" for rank in range(3)]

    def test_of_two_fixtures(self, saved_by_4, saved_by_3, tmp_path, number):
        assert len(files_in(tmp_path)) == 7

    def test_of_the_ranks_of_one_test(self, tmpdir, tmp_path, number):
        assert tmpdir.check(dir=True)
        if dist.get_rank() == 0:
            tmpdir.join("note").write("from 0")
        dist.barrier()
        assert (tmp_path / "note").read_text() == "from 0"

    @pytest.mark.world_size(1)
    def test_of_the_whole_class(self, class_tmpdir, number):
        assert "rank3of4" in files_in(class_tmpdir)


class TestOtherClass(DistributedTest):
    def test_has_its_own(self, class_tmpdir):
        assert files_in(class_tmpdir) == []
"""

NEEDED = """
class first(DistributedFixture):
    world_size = 2

    def run(self, tmpdir):
        Path(tmpdir, f"first{dist.get_rank()}").touch()


class second(DistributedFixture):
    world_size = 1

    def run(self, first, tmpdir):
        Path(tmpdir, "found").write_text(" ".join(files_in(tmpdir)))


@pytest.fixture
def calls_first(request):
    first()(request)


class third(DistributedFixture):
    world_size = 1

    def run(self, calls_first, tmpdir):
        Path(tmpdir, "found").write_text(" ".join(files_in(tmpdir)))


@pytest.fixture
def calls_second(request):
    second()(request)


@pytest.fixture
def calls_third(request):
    third()(request)


class TestNeeded(DistributedTest):
    def test_by_a_named_one(self, second, tmpdir):
        assert Path(tmpdir, "found").read_text() == "first0 first1"

    def test_by_a_called_one(self, calls_second, tmpdir):
        assert Path(tmpdir, "found").read_text() == "first0 first1"

    def test_by_a_fixture_of_a_called_one(self, calls_third, tmpdir):
        assert Path(tmpdir, "found").read_text() == "first0 first1"


@pytest.fixture(scope="class")
def of_class_calls_first(request):
    first()(request)


@pytest.fixture(scope="session")
def of_session_calls_first(request):
    first()(request)


class TestWideScopes(DistributedTest):
    def test_of_the_class(self, of_class_calls_first, tmpdir):
        assert files_in(tmpdir) == ["first0", "first1"]

    def test_of_the_class_again(self, of_class_calls_first, tmpdir):
        assert files_in(tmpdir) == ["first0", "first1"]

    def test_of_the_session(self, of_session_calls_first, tmpdir):
        assert files_in(tmpdir) == ["first0", "first1"]


class TestAutomatic(DistributedTest):
    @pytest.fixture(autouse=True)
    def automatic(self, calls_first):
        pass

    @pytest.fixture(autouse=True)
    def calls_automatically(self, request):
        second()(request)

    def test_of_automatic_calls(self, tmpdir):
        assert files_in(tmpdir) == ["first0", "first1", "found"]

class circular(DistributedFixture):
    world_size = 1

    def run(self, calls_circular):
        pass


@pytest.fixture
def calls_circular(request):
    circular()(request)


class TestCircular(DistributedTest):
    def test_of_a_cycle(self, calls_circular):
        pass
"""

FIXTURES = """
class broken(DistributedFixture):
    world_size = 3

    def run(self):
        print("about to fail")
        if dist.get_rank() == 1:
            raise ValueError("no room")
        dist.barrier()


class skipping(DistributedFixture):
    world_size = 2

    def run(self):
        pytest.skip("no such device")


class fine(DistributedFixture):
    world_size = 3

    def run(self):
        print("three of us" if dist.get_rank() == 0 else "")


@pytest.fixture
def calls_fine(request):
    fine()(request)


@pytest.fixture
def calls_fine_afterwards(request):
    yield
    fine()(request)


@pytest.fixture(scope="class")
def of_class_calls_fine(request):
    fine()(request)


class TestFixtures(DistributedTest):
    def test_of_a_broken_one(self, broken):
        print("the body ran")

    def test_of_a_skipping_one(self, skipping):
        raise AssertionError("the body ran")

    def test_that_fails_behind_a_fine_one(self, fine):
        raise AssertionError("here")

    @pytest.mark.xfail(strict=True, reason="known")
    def test_expected_to_fail_behind_a_fine_one(self, fine):
        raise AssertionError("here")

    @pytest.mark.xfail(strict=True, reason="known")
    def test_expected_to_fail_by_its_fixture(self, broken):
        pass

    @pytest.mark.skip(reason="not run at all")
    def test_skipped_before_a_broken_one(self, broken):
        pass

    def test_that_asks_too_late(self, request):
        request.getfixturevalue("fine")

    def test_that_asks_too_late_for_a_call(self, request):
        request.getfixturevalue("calls_fine")

    def test_that_asks_too_late_for_a_call_of_its_class(self, request):
        request.getfixturevalue("of_class_calls_fine")

    def test_that_calls_the_class(self, request):
        fine()(request)

    def test_that_calls_what_its_fixture_calls(self, calls_fine, request):
        fine()(request)

    def test_that_is_followed_by_a_call(self, calls_fine_afterwards):
        pass

    def test_that_has_a_fixture_that_asks_too_late(self, asks_too_late):
        pass


@pytest.fixture
def asks_too_late(request):
    request.getfixturevalue("calls_fine")


def test_outside_of_ranks(fine):
    pass


def test_outside_of_ranks_by_a_call(calls_fine):
    pass


class ungrouped(DistributedFixture):
    world_size = 3
    init_distributed = False

    def run(self):
        assert not dist.is_initialized()


class TestUngroupedFixture(DistributedTest):
    def test_it(self, ungrouped):
        assert dist.is_initialized()
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> SessionRun:
    """One session with the tests of DIRECTORIES, NEEDED and FIXTURES, without DeepSpeed."""
    return run(tmp_path_factory.mktemp("session"), DIRECTORIES + NEEDED + FIXTURES)


def test_directories_are_shared_by_ranks_tests_and_fixtures(session: SessionRun) -> None:
    found = session.verdicts("TestDirectories") | session.verdicts("TestOtherClass")
    assert len(found) == 13
    assert set(found.values()) == {"passed"}


def test_a_called_fixture_runs_after_the_fixtures_that_it_needs(session: SessionRun) -> None:
    found = session.verdicts("TestNeeded")
    assert len(found) == 3
    assert set(found.values()) == {"passed"}


def test_a_fixture_of_any_scope_calls_the_class_for_each_test(session: SessionRun) -> None:
    found = session.verdicts("TestWideScopes") | session.verdicts("TestAutomatic")
    assert len(found) == 4
    assert set(found.values()) == {"passed"}


def test_a_failing_fixture_fails_the_setup_and_names_itself_and_its_rank(session: SessionRun) -> None:
    assert session.tests["TestFixtures::test_of_a_broken_one"].verdict == "error"
    result = session.text("TestFixtures::test_of_a_broken_one")
    assert "rank 1: ValueError: no room" in result
    assert "broken failed on 3 ranks of its own, in setup; the test was not run" in session.output
    assert "the body ran" not in session.output


def test_a_skip_and_an_expected_failure_apply_to_the_test_of_the_fixture(session: SessionRun) -> None:
    assert session.tests["TestFixtures::test_of_a_skipping_one"].verdict == "skipped"
    assert "no such device" in session.text("TestFixtures::test_of_a_skipping_one")
    assert session.tests["TestFixtures::test_skipped_before_a_broken_one"].verdict == "skipped"
    for name in ("behind_a_fine_one", "by_its_fixture"):
        assert "known" in session.text(f"TestFixtures::test_expected_to_fail_{name}")


def test_output_of_a_fixture_is_shown_with_the_failing_test(session: SessionRun) -> None:
    assert session.tests["TestFixtures::test_that_fails_behind_a_fine_one"].verdict == "failed"
    assert "[rank 0] three of us" in session.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TestFixtures::test_that_asks_too_late", "must request it as a parameter; got request.getfixturevalue"),
        ("test_outside_of_ranks", "the fixture fine runs on 3 ranks of its own before a test on ranks, but this test"),
        ("test_outside_of_ranks_by_a_call", "this test runs in pytest's own process; mark the test with"),
    ],
)
def test_wrong_uses_of_a_fixture_are_refused_with_the_remedy(session: SessionRun, name: str, message: str) -> None:
    assert message in session.text(name)


@pytest.mark.parametrize(
    ("test", "place"),
    [
        ("asks_too_late_for_a_call", "in {nodeid} (call)"),
        ("asks_too_late_for_a_call_of_its_class", "in {nodeid} (call)"),
        ("calls_the_class", "in {nodeid} (call)"),
        ("calls_what_its_fixture_calls", "in {nodeid} (call)"),
        ("is_followed_by_a_call", "in {nodeid} (teardown)"),
        ("has_a_fixture_that_asks_too_late", "in the fixture calls_fine, which was not found in advance"),
    ],
)
def test_a_call_outside_of_the_setup_of_a_fixture_is_refused(session: SessionRun, test: str, place: str) -> None:
    name = f"TestFixtures::test_that_{test}"
    got, allowed, remedy = (
        f"got a call of the DistributedFixture fine {place.format(nodeid=f'test_session.py::{name}')}",
        "fine runs before the ranks of a test start, so only the setup of a fixture that the test requests as a "
        "parameter may call it, by its global name",
        "give the test a parameter named fine, or that of such a fixture",
    )
    assert f"{got}; {allowed}; {remedy}" in session.text(name)


def test_a_fixture_that_needs_its_own_call_is_refused(session: SessionRun) -> None:
    text = session.text("TestCircular::test_of_a_cycle")
    assert "got a call of the DistributedFixture circular in the fixture calls_circular, which circular needs" in text


def test_a_fixture_may_have_no_group(session: SessionRun) -> None:
    assert session.verdicts("TestUngroupedFixture") == {"::test_it": "passed"}


def test_a_distributed_fixture_takes_one_world_size(tmp_path: Path) -> None:
    session = run(tmp_path, "class wrong(DistributedFixture):\n    world_size = [2, 4]\n")
    assert "wrong: got world_size [2, 4]; a DistributedFixture takes one whole number" in session.output
