"""Files are written whole, also by several ranks at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from zharness.run.files import partial_path, require_writable


def test_a_path_is_writable_when_another_rank_removes_the_file_of_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = Path.touch

    def touch_and_lose(path: Path) -> None:
        touch(path)
        path.unlink()

    monkeypatch.setattr(Path, "touch", touch_and_lose)
    require_writable(tmp_path / "reach.jsonl")
    assert not partial_path(tmp_path / "reach.jsonl").exists()
