"""Send the allure data of a test on ranks (steps, attachments, labels, ...) to the one result of the pytest process.

On a rank, allure's pytest hooks are silent (``listeners.py``), but ``allure.step`` and ``allure.attach`` still call
allure's listener, which adds to the last result that was scheduled. So each rank schedules an empty result for each
test, and sends that result afterwards. The rank itself writes the files of attachments to the folder of the session.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

RANK_RESULT = "zharness-rank"  # the name under which a rank schedules its result
LISTS = ("steps", "attachments", "labels", "links", "parameters")
TEXTS = ("name", "description", "descriptionHtml")


def start_result(config: pytest.Config) -> None:
    """Let allure add to an empty result of this rank from now on; no effect without ``--alluredir``."""
    logger = get_logger(config)
    if logger is not None:
        take_results(config)  # remove the result of a test that raised before its result was taken
        logger.schedule_test(RANK_RESULT, sys.modules["allure_commons.model2"].TestResult())


def take_results(config: pytest.Config) -> tuple[bytes, ...]:
    """Return the pickled result of this rank, or nothing if it is empty, and stop allure from adding to it."""
    logger = get_logger(config)
    result = logger.get_test(RANK_RESULT) if logger is not None else None
    if result is None:
        return ()
    logger.drop_test(RANK_RESULT)
    return (pickle.dumps(result),) if any(getattr(result, name) for name in (*LISTS, *TEXTS)) else ()


def add_results(config: pytest.Config, results: Mapping[int, tuple[bytes, ...]]) -> None:
    """Add the results of the ranks, by rank, to the result of the test that this process reports now.

    The result of rank 0 is added unchanged. If the steps and attachments of another rank differ from those of rank 0,
    they are added within a step that names the rank; if they are equal, the files of their attachments are removed.
    """
    logger = get_logger(config)
    shown = logger.get_test(None) if logger is not None else None
    if shown is None:
        return
    folder = Path(config.option.allure_report_dir)
    outline_of_rank_0: object = ([], [])
    for rank, pickled in sorted(results.items()):
        for result in map(pickle.loads, pickled):
            if rank == 0:
                outline_of_rank_0 = outline(result, folder)
                merge_result(shown, result)
            elif outline(result, folder) != outline_of_rank_0:
                shown.steps.append(make_rank_step(rank, result))
            else:
                for attachment in iter_attachments(result):
                    (folder / attachment.source).unlink(missing_ok=True)


def get_logger(config: pytest.Config) -> Any:
    """Return the part of allure's plugin that keeps results, or None if allure writes none in this session."""
    return getattr(config.pluginmanager.getplugin("allure_listener"), "allure_logger", None)


def merge_result(shown: Any, result: Any) -> None:
    """Add the allure data of a test on rank 0 to the result ``shown``, as if the test had run in this process."""
    for name in TEXTS:
        setattr(shown, name, getattr(result, name) or getattr(shown, name))
    replaced = {parameter.name for parameter in result.parameters}
    shown.parameters[:] = [parameter for parameter in shown.parameters if parameter.name not in replaced]
    for name in LISTS:
        getattr(shown, name).extend(getattr(result, name))


def make_rank_step(rank: int, result: Any) -> Any:
    """Return a step that holds the steps and the attachments of one rank."""
    times = [time for step in result.steps for time in (step.start, step.stop) if time is not None]
    return sys.modules["allure_commons.model2"].TestStepResult(
        name=f"rank {rank}",
        status=next((step.status for step in result.steps if step.status != "passed"), "passed"),
        steps=result.steps,
        attachments=result.attachments,
        start=min(times, default=None),
        stop=max(times, default=None),
    )


def outline(result: Any, folder: Path) -> object:
    """Return the steps and attachments of a result as plain data, without times and names of files."""
    steps = [
        (step.name, step.status, [(entry.name, entry.value) for entry in step.parameters], outline(step, folder))
        for step in result.steps
    ]
    return steps, [(entry.name, entry.type, read_file(folder / entry.source)) for entry in result.attachments]


def read_file(file: Path) -> bytes:
    """Return the content of an attachment; empty bytes if the test has removed the file."""
    return file.read_bytes() if file.exists() else b""


def iter_attachments(result: Any) -> Iterator[Any]:
    """Yield the attachments of a result and of its steps."""
    yield from result.attachments
    for step in result.steps:
        yield from iter_attachments(step)
