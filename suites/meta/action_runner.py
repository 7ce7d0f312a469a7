"""Run the steps of the action check as GitHub's runner does: conditions, inputs, variables, and each `run:` in bash.

Actions that a step uses are replaced: the cache is a dictionary, the artifacts are a folder, and the Python is the one
that is there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from suites.attached.launches import run_commands

ACTION = Path(__file__).parents[2] / ".github" / "actions" / "check"
_NAME = re.compile(r"'[^']*'|\b[a-z][\w.-]*\b(?!\()")
_EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")
_STATUS = re.compile(r"\b(always|success|failure|cancelled)\(\)")
STEP_LIMIT = 300.0  # seconds for one `run:`, on a machine that other tests share


def evaluate(expression: str, names: Mapping[str, object]) -> object:
    """Evaluate the part of GitHub's expression language that the action uses."""
    python = expression.replace("always()", "True").replace("&&", " and ").replace("||", " or ")
    found = _NAME.sub(lambda match: match[0] if match[0][0] == "'" else f"names[{match[0]!r}]", python)
    found = re.sub(r"names\['(and|or)'\]", r"\1", found)
    return eval(found, {"__builtins__": {}, "names": _Names(names)})  # noqa: S307 - an expression of this repository


def fill(text: str, names: Mapping[str, object]) -> str:
    """Replace each ``${{ expression }}`` of ``text`` by its value."""
    return _EXPRESSION.sub(lambda found: str(evaluate(found[1], names)), text)


class _Names(dict[str, object]):
    """Names, of which one that is not there is empty, as the output of a step that was skipped."""

    def __missing__(self, name: str) -> str:
        assert name.startswith("steps."), name
        return ""


@dataclass
class Runner:
    """A machine that runs a job: its workspace, and the folders that outlive the job."""

    workspace: Path
    folder: Path
    programs: Path
    ran: list[str] = field(default_factory=list)
    # What actions/cache saved, the oldest first. GitHub finds a file only under the path from which it was saved.
    cache: dict[tuple[str, str], bytes] = field(default_factory=dict)

    @property
    def temporary(self) -> Path:
        """The folder ``runner.temp``, the same for each job, which a job finds empty."""
        return self.folder / "temp"

    @property
    def summary(self) -> Path:
        """The file of the summary of the newest job."""
        return self.folder / "summary.md"

    @property
    def artifacts(self) -> Path:
        """The folder of the artifacts of the newest job."""
        return self.folder / "artifacts"

    def run_job(self, event: str, run_id: int, inputs: Mapping[str, str]) -> int:
        """Run the action in a job of ``event`` with ``inputs``, and return the exit code of the step that failed, or 0.

        Programs in ``programs`` come before those of the machine.
        """
        action = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
        assert set(inputs) <= set(action["inputs"])
        for folder in (self.temporary, self.artifacts):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self.summary.write_text("", encoding="utf-8")
        names = {
            **self.name_values(event, run_id),
            **{f"inputs.{name}": inputs.get(name, given["default"]) for name, given in action["inputs"].items()},
        }
        status = 0
        for step in action["runs"]["steps"]:
            condition = str(step.get("if", "success()"))
            if (status and not _STATUS.search(condition)) or not evaluate(
                condition.replace("success()", str(not status)), names
            ):
                names[f"steps.{step.get('id')}.outcome"] = "skipped"
                continue
            code = self.run_step(step, names)
            names[f"steps.{step.get('id')}.outcome"] = "failure" if code else "success"
            status = status or code
        return status

    def name_values(self, event: str, run_id: int) -> dict[str, object]:
        """Return the values of the names that a job of ``event`` has beside its inputs."""
        return {
            "github.event_name": event,
            "github.run_id": str(run_id),
            "github.action_path": str(ACTION),
            "runner.os": "Linux",
            "runner.temp": str(self.temporary),
        }

    def run_step(self, step: Mapping[str, Any], names: dict[str, object]) -> int:
        """Run one step, and return its exit code."""
        if "uses" in step:
            given = {key: fill(str(value), names) for key, value in step.get("with", {}).items()}
            names.update(self.replace_action(step["uses"].partition("@")[0], step.get("id", ""), given))
            return 0
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_EVENT_NAME": str(names["github.event_name"]),
            "RUNNER_TEMP": str(names["runner.temp"]),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            **{key: fill(str(value), names) for key, value in step.get("env", {}).items()},
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        folder = self.workspace / fill(step.get("working-directory", "."), names)
        done = run_commands([(command, environment)], folder, STEP_LIMIT)
        self.ran.append(f"$ {step['run']}\n{done.output}")
        return done.statuses[0]

    def replace_action(self, action: str, identifier: str, given: Mapping[str, str]) -> dict[str, object]:
        """Do what an action does to files, and return its outputs."""
        if action == "actions/cache/save":
            entry = (given["path"], given["key"])
            # GitHub only warns of a file that is not there or of a key that is taken; the step succeeds.
            if not Path(given["path"]).is_file() or entry in self.cache:
                self.ran.append(f"warning: {action} saved nothing as {given['key']}")
            else:
                self.cache[entry] = Path(given["path"]).read_bytes()
        elif action == "actions/cache/restore":
            for wanted in (given["key"], *given["restore-keys"].splitlines()):
                for path, key in reversed(self.cache):
                    if path == given["path"] and key.startswith(wanted):
                        Path(path).write_bytes(self.cache[path, key])
                        return {f"steps.{identifier}.outputs.cache-matched-key": key}
        elif action == "actions/upload-artifact":
            for pattern in given["path"].split():
                for path in Path(pattern).parent.glob(Path(pattern).name):
                    shutil.copy(path, self.artifacts / path.name) if path.is_file() else None
        else:
            assert action == "actions/setup-python", action
        return {}
