"""Results of plain PyTorch from earlier runs are read exactly where nothing they depend on has changed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from zharness.cli.model import model as command
from zharness.errors import UsageError
from zharness.parity import baseline_cache
from zharness.parity.baseline import Baseline
from zharness.parity.baseline_cache import (
    FOLDER_VARIABLE,
    KEPT_SECONDS,
    BaselineCache,
    UnknownDependencyError,
    decode,
    describe,
    encode,
    use_cache,
    with_cache,
)
from zharness.workload import model_spec
from zharness.workload.user_model import register_factory, unregister_factory, user_model_spec

MODEL = "suites.model.tiny:perceptron"
FACTORY = """
import torch
from torch import nn
import scaling_of_my_loss

def factory():
    return nn.Linear(3, 2), lambda generator: torch.randn(4, 3, generator=generator), loss

def loss(output, batch):
    return scaling_of_my_loss.FACTOR * output.square().mean()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with use_cache(tmp_path / "cache", lambda _line: None):
        yield tmp_path / "cache"


def count(folder: Path) -> int:
    """Return the number of entries."""
    return len(BaselineCache(folder).list_entries())


def cached(**settings: Any) -> Baseline:
    """Return the baseline of the perceptron with the cache of this test."""
    return with_cache(Baseline(model_spec(MODEL), 0, 2, **settings))


def test_a_second_run_reads_the_same_bits_and_computes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached().run_all_ranks()
    assert count(folder) == 2

    def refuse(*_: object) -> None:
        raise AssertionError("plain PyTorch ran again")

    monkeypatch.setattr(Baseline, "objective", refuse)
    for earlier, later in zip(first, cached().run_all_ranks(), strict=True):
        assert torch.equal(earlier.loss, later.loss)
        assert earlier.grads.keys() == later.grads.keys()
        assert all(torch.equal(grad, later.grads[name]) for name, grad in earlier.grads.items())


def halve(loss: Tensor, _rank: int) -> Tensor:
    """Return half of a loss."""
    return loss / 2


def scale_by(factor: float) -> Callable[[Tensor, int], Tensor]:
    """Return a function that multiplies a loss."""
    return lambda loss, _rank: loss * factor


@pytest.mark.parametrize(
    "change",
    [
        lambda: cached().run_rank(0, 1),
        lambda: cached().run_rank(0, 0, weigh=halve),
        lambda: cached().run_rank(0, 0, weigh=scale_by(3.0)),
        lambda: cached(dtype=torch.bfloat16).run_rank(0, 0),
        lambda: cached(autocast=torch.bfloat16).run_rank(0, 0),
        lambda: cached(loss_scale=8.0).run_rank(0, 0),
        lambda: replace(cached(), seed=1).run_rank(0, 0),
        lambda: cached().run_rank(0, 0, params=edited()),
    ],
    ids=["batch", "weigh", "factor", "dtype", "autocast", "scale", "seed", "weights"],
)
def test_what_changes_the_result_changes_its_name(folder: Path, change: Callable[[], object]) -> None:
    cached().run_rank(0, 0)
    cached().run_rank(0, 0, weigh=scale_by(2.0))
    assert count(folder) == 2
    change()
    assert count(folder) == 3


def edited() -> dict[str, Tensor]:
    """Return the initial weights with one bit changed."""
    weights = {name: p.detach().clone() for name, p in cached().build_module().named_parameters()}
    first = next(iter(weights.values())).flatten()
    first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))
    return weights


def test_an_edited_module_of_the_user_changes_the_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_cached_model.py").write_text(FACTORY)
    losses = []
    for factor in (1, 20):
        (tmp_path / "scaling_of_my_loss.py").write_text(f"FACTOR = {factor}\n")
        for name in ("my_cached_model", "scaling_of_my_loss"):
            sys.modules.pop(name, None)
        user_model_spec.cache_clear()
        losses.append(with_cache(Baseline(model_spec("my_cached_model:factory"), 0, 2)).run_rank(0, 0).loss)
    assert count(folder) == 2
    assert torch.equal(20 * losses[0], losses[1])


def test_an_edited_module_that_a_forward_imports_changes_the_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    late = FACTORY.replace("import scaling_of_my_loss\n", "").replace(
        "    return scaling", "    import scaling_of_my_loss\n    return scaling"
    )
    (tmp_path / "my_late_model.py").write_text(late)
    losses = []
    for factor in (1, 20):
        (tmp_path / "scaling_of_my_loss.py").write_text(f"FACTOR = {factor}\n")
        for name in ("my_late_model", "scaling_of_my_loss"):
            sys.modules.pop(name, None)
        user_model_spec.cache_clear()
        runs = [with_cache(Baseline(model_spec("my_late_model:factory"), 0, 2)).run_rank(0, 0) for _ in range(2)]
        losses += [runs[0].loss, runs[1].loss]
    assert count(folder) == 2, "the first run of each, which imports the module, is not kept"
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(20 * losses[0], losses[2])
    assert torch.equal(losses[2], losses[3])


def test_a_model_that_is_not_in_a_file_or_joins_ranks_is_not_kept(folder: Path) -> None:
    register_factory(
        "given.here:factory", lambda: (torch.nn.Linear(2, 2), lambda g: torch.randn(2, 2, generator=g), sum)
    )
    try:
        spec = replace(model_spec("given.here:factory"), loss=lambda output, _batch: output.sum())
        with_cache(Baseline(spec, 0, 2)).run_rank(0, 0)
    finally:
        unregister_factory("given.here:factory")
    with_cache(Baseline(model_spec("suites.model.zoo:sync_norm"), 0, 2)).run_rank(0, 0)
    with_cache(Baseline(model_spec("mlp"), 0, 2)).run_rank(0, 0)
    cached().run_rank(0, 0, objective=partial(lambda _cell, output, batch: output.sum(), object()))
    assert count(folder) == 0


def test_a_damaged_entry_is_computed_again(folder: Path) -> None:
    first = cached().run_rank(0, 0)
    (name,) = BaselineCache(folder).list_entries()
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert decode(bytes(content)) is None
    assert decode(b"") is None
    assert torch.equal(cached().run_rank(0, 0).loss, first.loss)
    assert decode((folder / name).read_bytes()) is not None, "it has been written again"


def test_every_shape_and_dtype_is_read_as_it_was_written() -> None:
    numbers = {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
        "narrow": torch.tensor([[1.5], [float("nan")]], dtype=torch.bfloat16),
        "counts": torch.tensor([3]),
    }
    found = decode(encode(numbers))
    assert found is not None
    assert found.keys() == numbers.keys()
    for name, tensor in numbers.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num())


def test_the_attributes_of_modules_are_in_the_name(folder: Path) -> None:
    spec = model_spec(MODEL)

    def key(**attributes: object) -> str:
        model = spec.model(0)
        vars(model).update(attributes)
        return baseline_cache.compute_key(spec, model, spec.micro_batch(0, 0, 0), ())

    mask = torch.tensor([1.0, 0.0])
    kinds = (
        {},
        {"scale": 2},
        {"scale": [2, 3]},
        {"scale": [2, 4]},
        {"scale": {"a": (mask,)}},
        {"scale": {"a": (-mask,)}},
    )
    assert len({key(**attributes) for attributes in kinds}) == len(kinds)
    assert key(scale={"a": (mask,)}) == key(scale={"a": (mask.clone(),)})
    assert key(scale=object()) == key(scale=object())


def test_what_two_runs_and_a_full_disk_do_to_a_folder(tmp_path: Path) -> None:
    kept = BaselineCache(tmp_path)
    kept.store("a", {"x": torch.ones(2)})
    unfinished = tmp_path / f"b.1{baseline_cache.UNFINISHED}"
    unfinished.write_bytes(b"")
    kept.remove_old_entries()
    assert unfinished.exists(), "another run may still write it"
    os.utime(unfinished, (0, 0))
    kept.remove_old_entries()
    assert not unfinished.exists()
    (tmp_path / f"removed{baseline_cache.SUFFIX}").symlink_to(tmp_path / "nothing")
    assert kept.list_entries().keys() == {f"a{baseline_cache.SUFFIX}"}
    BaselineCache(tmp_path / "gone").store("a", {"x": torch.ones(2)})


def test_functions_are_the_same_if_their_variables_are() -> None:
    assert describe(scale_by(2.0)) == describe(scale_by(2.0)) != describe(scale_by(4.0))
    with pytest.raises(UnknownDependencyError):
        describe(partial(halve, object()))


def test_an_entry_that_nobody_used_for_a_month_is_removed(folder: Path) -> None:
    cached().run_rank(0, 0)
    (name,) = BaselineCache(folder).list_entries()
    old = time.time() - 2 * KEPT_SECONDS
    os.utime(folder / name, (old, old))
    lines: list[str] = []
    with use_cache(folder, lines.append):
        assert count(folder) == 0
        cached().run_rank(0, 0)
    assert lines[0].startswith(f"{folder}: 0 results of plain PyTorch read, 1 added; ")
    assert os.environ[FOLDER_VARIABLE] == str(folder), "the outer block goes on"


def test_the_command_refuses_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sentence = "cannot write the cache of baselines .*; expected a folder of your own"
    with pytest.raises(UsageError, match=sentence), use_cache(tmp_path / "file" / "cache", lambda _line: None):
        pass
    assert "--baseline-cache" in CliRunner().invoke(command, ["--help"]).output


def test_without_the_option_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert type(cached()) is Baseline
    assert baseline_cache.describe_environment() == baseline_cache.describe_environment()
