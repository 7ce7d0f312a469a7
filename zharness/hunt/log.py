"""Write the log of a hunt as JSON lines, and read it to resume the hunt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zharness.errors import UsageError
from zharness.hunt.groups import AlarmGroup
from zharness.mesh import Mesh
from zharness.run.files import unwritable_error
from zharness.run.program_runner import ProgramOutcome
from zharness.run.record import Verdict
from zharness.workload.program_text import parse_program
from zharness.workload.programs import Program

SCHEMA = 1


@dataclass(frozen=True)
class DrawRecord:
    """The outcome of one draw. ``group`` is the number of its alarm's group, or 0 if it raised no alarm.

    ``new_arcs`` is the number of the engine's arcs that no earlier draw had reached, if they are measured.
    """

    number: int
    program: Program
    outcome: ProgramOutcome
    seconds: float
    group: int = 0
    note: str = ""
    new_arcs: int = 0


@dataclass
class HuntState:
    """The results of earlier calls with the same log: the number of draws, the groups, and the verdicts by number.

    ``productive_draws`` are the numbers of the draws that reached new arcs of the engine.
    """

    draw_count: int = 0
    groups: list[AlarmGroup] = field(default_factory=list)
    verdicts: dict[str, int] = field(default_factory=dict)
    alarm_count: int = 0
    unconfirmed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    productive_draws: set[int] = field(default_factory=set)

    def add_draw(self, record: DrawRecord) -> None:
        """Count a draw, and add it to its group."""
        self.draw_count = max(self.draw_count, record.number)
        verdict = record.outcome.verdict
        self.verdicts[verdict.value] = self.verdicts.get(verdict.value, 0) + 1
        self.alarm_count += verdict.is_broken
        if record.new_arcs:
            self.productive_draws.add(record.number)
        if record.note:
            self.unconfirmed.append(f"draw {record.number}: {record.note}")
        if verdict is Verdict.ERROR:
            self.errors.append(f"draw {record.number}: {record.outcome.cause}")
        for group in self.groups:
            if group.number == record.group:
                group.draws.append(record.number)


class HuntLog:
    """The log of one hunt: a line with its settings, and one line for each draw and each group of alarms."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the log at ``path``. Raises UsageError if it cannot be written or is the log of another hunt."""
        self._path = path
        self._settings = {"hunt": SCHEMA, **settings}
        self.state = self._read_state()
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable_error(path, error) from error
        if self._is_new:
            self._write(self._settings)

    def _read_state(self) -> HuntState:
        """Read the lines that earlier calls wrote, and cut off a last line that is incomplete."""
        state = HuntState()
        self._is_new = not self._path.exists() or not self._path.read_text(encoding="utf-8").strip()
        if self._is_new:
            return state
        text = self._path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._path.write_text(whole, encoding="utf-8")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            first = lines[0] if lines else {}
            if first != self._settings:
                differing = sorted(
                    key for key in {*first, *self._settings} if first.get(key) != self._settings.get(key)
                )
                raise UsageError(
                    f"{self._path} is the log of another hunt, which differs in {', '.join(differing)}; name another "
                    "folder, or repeat the options of that hunt"
                )
            for line in lines[1:]:
                if "group_number" in line:
                    state.groups.append(read_group(line))
                else:
                    state.add_draw(read_draw(line))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{self._path} is not the log of a hunt: {type(error).__name__}: {error}") from error
        return state

    def write_draw(self, record: DrawRecord) -> None:
        """Append a draw and count it."""
        self.state.add_draw(record)
        line = {"draw": record.number, "program": program_as_json(record.program), **outcome_as_json(record.outcome)}
        arcs = {"new_arcs": record.new_arcs} if record.new_arcs else {}
        self._write({**line, "seconds": round(record.seconds, 3), "group": record.group, "note": record.note, **arcs})

    def write_group(self, group: AlarmGroup) -> None:
        """Append a new group, before the draw that raised its first alarm."""
        self.state.groups.append(group)
        line = {"group_number": group.number, "program": program_as_json(group.smallest)}
        facts = {"known": group.known, "script": group.script, "script_result": group.script_result}
        self._write({**line, **outcome_as_json(group.outcome), **facts})

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append one line; a process that is killed loses at most the line that it is writing."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> HuntLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def program_as_json(program: Program) -> dict[str, Any]:
    """Return the text of ``program`` and its settings as a dictionary that JSON can represent."""
    settings = {key: value for key, value in asdict(program).items() if key not in ("layers", "verbs", "mesh")}
    on_mesh = {"mesh": program.mesh.label} if program.mesh.sizes else {}
    return {"text": str(program), **settings, **on_mesh}


def read_program(fields: Mapping[str, Any]) -> Program:
    """Return the program that ``program_as_json`` wrote. Raises UsageError for a text that is not a program."""
    settings = {key: value for key, value in fields.items() if key != "text"}
    settings["options"] = tuple(settings["options"])
    settings["mesh"] = Mesh.parse(settings.get("mesh", ""))
    return parse_program(fields["text"], Program((), (), **settings))


def outcome_as_json(outcome: ProgramOutcome) -> dict[str, str]:
    """Return the verdict, the cause and the file that raised an exception as a dictionary."""
    facts = {"verdict": outcome.verdict.value, "cause": outcome.cause}
    return {**facts, "innermost_file": outcome.innermost_file} if outcome.innermost_file else facts


def read_outcome(line: Mapping[str, Any]) -> ProgramOutcome:
    """Return the outcome that ``outcome_as_json`` wrote."""
    return ProgramOutcome(Verdict(line["verdict"]), line["cause"], line.get("innermost_file", ""))


def read_draw(line: Mapping[str, Any]) -> DrawRecord:
    """Return the draw of a line of the log."""
    program, outcome = read_program(line["program"]), read_outcome(line)
    new_arcs = line.get("new_arcs", 0)
    return DrawRecord(line["draw"], program, outcome, line["seconds"], line["group"], line["note"], new_arcs)


def read_group(line: Mapping[str, Any]) -> AlarmGroup:
    """Return the alarm group that a line of the log describes. Its list of draws is empty."""
    program, outcome = read_program(line["program"]), read_outcome(line)
    return AlarmGroup(line["group_number"], program, outcome, line["known"], line["script"], line["script_result"])
