"""An expected failure that names a user's model is reported if nothing matches it, or if its path names nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.run.failure_files import ENTRY, load_entries
from suites.run.test_expected_failures import claims
from zharness.laws import DTYPES
from zharness.run import Request, plan
from zharness.run.unmatched_failures import describe_unmatched_failures


def test_an_entry_for_a_users_model_is_reported_by_a_run_that_has_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_of_a_user.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(2, 1), lambda generator: torch.ones(2, 2)\n"
        "\n\nother = net\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    net, other = "nets_of_a_user:net", "nets_of_a_user:other"
    right, mistyped, elsewhere, never = (
        load_entries(tmp_path, f'engine = "ddp"\n{ENTRY}models = ["{model}"]\n'.replace("training.grads", law))[0]
        for model, law in (
            (net, "training.grads"),
            ("nets_of_a_user:nte", "training.grads"),
            (other, "training.grads"),
            (net, "training.trajectory"),
        )
    )
    cells = plan(Request(("training.grads",), ("ddp",), models=(net,), dtypes=tuple(DTYPES)), claims)
    assert not describe_unmatched_failures(cells, claims, (right, elsewhere))
    (description,) = describe_unmatched_failures(cells, claims, (right, mistyped))
    assert "names a model that cannot be imported" in description
    assert "has no callable 'nte'" in description
    (description,) = describe_unmatched_failures(cells, claims, (never, right))
    assert description.startswith(f"{never.location}: no cell of ddp")
    without = plan(Request(("training.grads",), ("ddp",)), claims)
    (description,) = describe_unmatched_failures(without, claims, (mistyped, right, elsewhere, never))
    assert "has no callable 'nte'" in description


def test_a_run_without_users_models_reports_a_mistyped_module_but_imports_no_dependency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_with_a_dependency.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    needy, mistyped, in_package = (
        load_entries(tmp_path, f'engine = "ddp"\n{ENTRY}models = ["{model}:net"]\n')[0]
        for model in ("nets_with_a_dependency", "nest_with_a_dependency", "no_package.nets")
    )
    without = plan(Request(("training.grads",), ("ddp",)), claims)
    assert not describe_unmatched_failures(without, claims, (needy,))
    for entry, missing in ((mistyped, "nest_with_a_dependency"), (in_package, "no_package")):
        (description,) = describe_unmatched_failures(without, claims, (entry,))
        assert f"No module named '{missing}'" in description
