"""Define the facts by which alarms of different causes are distinguished.

The cause of a wrong number with a hint is the hint, which names the fault. The cause of a wrong number without a hint
is the role of the first wrong tensor: its layer, its part of the optimizer's state, the verb after which it was read,
and what is wrong with its value. The cause of a crash is the exception with its message or, without a message, the file
that raised it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zharness.export.shrink import FailureSignature, extract_failure_signature
from zharness.law_kit.record_comparisons import STALE_FORWARD_HINT
from zharness.run.program_runner import ProgramOutcome
from zharness.workload.programs import BLOCK_KINDS, Layer, LayerKind, Program

# Layers that may replace each other while a program is shrunk.
DENSE_LAYERS = (LayerKind.LINEAR, LayerKind.MATRIX, LayerKind.TOKENS)
_MISMATCH = re.compile(r"step (?P<step>\d+), [a-z ]+: (?P<name>[^\s\[]+)")
_VALUES = re.compile(r"\bexpected (?P<expected>\S+), got (?P<actual>\S+) \(")
_NUMBERS = re.compile(r"\d[\d.e+-]*")


class WrongValue(Enum):
    """The kinds of errors in the worst element of a tensor."""

    NOT_FINITE = "not finite"
    MISSING = "zero in place of another number"
    UNEXPECTED = "another number in place of zero"
    DIFFERENT = "another number"


@dataclass(frozen=True)
class TensorRole:
    """The role of the first wrong tensor of a program.

    ``blocks`` are the kinds of the blocks around its layer, and ``layer`` is the kind of its layer, or the name of a
    tensor that is not a parameter, such as ``output``. ``state`` is the part of the optimizer's state, or empty for the
    parameter and its gradient. ``act`` is the verb after which the tensor was wrong; it is empty for initial weights.
    """

    blocks: frozenset[str]
    layer: str
    state: str
    act: str
    value: WrongValue

    def may_shrink_to(self, smaller: TensorRole) -> bool:
        """Return whether a program with this role may shrink to a program with the role ``smaller``.

        Only the blocks may differ: ``smaller`` may lack some of them.
        """
        is_same = (self.layer, self.state, self.act, self.value) == (
            *(smaller.layer, smaller.state),
            *(smaller.act, smaller.value),
        )
        return is_same and smaller.blocks <= self.blocks


@dataclass(frozen=True)
class AlarmCause:
    """The facts that alarms of one cause share.

    ``detail`` is the file of an exception without a message, or the normalised description of an end without an
    exception. ``role`` is None for a wrong number with a hint, and for a failure that is not a wrong number.
    """

    signature: FailureSignature
    detail: str = ""
    role: TensorRole | None = None

    def may_shrink_to(self, smaller: AlarmCause) -> bool:
        """Return whether an alarm with this cause may shrink to an alarm with the cause ``smaller``."""
        if (self.signature, self.detail) != (smaller.signature, smaller.detail):
            return False
        if self.role is None or smaller.role is None:
            return self.role is smaller.role
        return self.role.may_shrink_to(smaller.role)


def find_cause(program: Program, outcome: ProgramOutcome) -> AlarmCause:
    """Return the cause of the alarm that ``program`` raised."""
    signature = extract_failure_signature(outcome.verdict, outcome.cause)
    if _MISMATCH.match(outcome.cause):
        has_hint = bool(signature.detail) or signature.failure_kind == STALE_FORWARD_HINT
        return AlarmCause(signature, role=None if has_hint else find_role(program, outcome.cause))
    if not signature.failure_kind:
        return AlarmCause(signature, normalize(outcome.cause))
    has_message = any(character.isalpha() for character in signature.detail.replace("(no message)", ""))
    return AlarmCause(signature, "" if has_message else Path(outcome.innermost_file).name)


def find_role(program: Program, cause: str) -> TensorRole | None:
    """Return the role of the tensor that ``cause`` names first; None if ``cause`` does not describe a wrong number."""
    match, values = _MISMATCH.match(cause), _VALUES.search(cause)
    if match is None or values is None:
        return None
    name, _, state = match["name"].partition("/")
    blocks, layer = find_owner(program.layers, name)
    step = int(match["step"])
    act = program.verbs[step - 1].act.value if 0 < step <= len(program.verbs) else ""
    return TensorRole(blocks, layer, state, act, classify_value(values["expected"], values["actual"]))


def find_owner(layers: tuple[Layer, ...], name: str) -> tuple[frozenset[str], str]:
    """Return the kinds of the blocks around the layer of a parameter, and the kind of that layer, or else ``name``.

    A parameter in the third layer of a block that is the model's second layer is named ``1.inner.2.weight``.
    """
    blocks: set[str] = set()
    for part in name.split("."):
        if part.isdecimal() and int(part) < len(layers):
            layer = layers[int(part)]
            if layer.kind not in BLOCK_KINDS:
                return frozenset(blocks), f"{'dense' if layer.kind in DENSE_LAYERS else layer.kind.value} layer"
            blocks.add(layer.kind.value)
            layers = layer.inner
        elif part != "inner":
            break
    return frozenset(blocks), name


def classify_value(expected: str, actual: str) -> WrongValue:
    """Return the kind of error of a number; both arguments are texts of numbers."""
    try:
        wanted, found = float(expected), float(actual)
    except ValueError:
        return WrongValue.DIFFERENT
    if not math.isfinite(found) and math.isfinite(wanted):
        return WrongValue.NOT_FINITE
    if found == 0:
        return WrongValue.MISSING
    return WrongValue.UNEXPECTED if wanted == 0 else WrongValue.DIFFERENT


def normalize(text: str) -> str:
    """Return ``text`` in one line, with a placeholder for each number: numbers differ between laws and programs."""
    return _NUMBERS.sub("#", " ".join(text.split()))
