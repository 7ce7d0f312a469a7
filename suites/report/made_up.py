"""Invent records of runs, with every outcome and every kind of evidence."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from zharness.cell import Cell
from zharness.laws import LAWS
from zharness.parity.ulps import CLASS_LABELS
from zharness.run.record import Record, Verdict, parse_record

ENGINES = (("reference", "0.1.0"), ("deepspeed", "0.19.8"), ("fsdp2", "2.13.0+cpu"), ("ddp", "2.13.0+cpu"))
SHAPE = (64, 96)
STEPS = range(8)
LAYERS = [f"blocks.{i}.{name}" for i in range(6) for name in ("attention.weight", "attention.bias", "mlp.weight")]
CAUSE = (
    "step 1, reduction: blocks.3.mlp.weight[17, 40] (owned by rank 1, element 136; seen on rank 0) expected 0.25, got "
    "0.125 (bound 1e-07, 8388608 ULP apart, 96 of 6144 elements wrong); it is the contribution of rank 0 alone"
)


def records(count: int, bad: float = 0.02, seed: int = 0) -> list[Record]:
    """Invent ``count`` records. About the share ``bad`` fails with evidence, and some others did not pass either."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    return [make_record(cell, version, chance, bad) for cell, version in itertools.islice(cells(), count)]


def cells() -> Iterator[tuple[Cell, str]]:
    """Yield cells without end, as several runs of the whole matrix would have them."""
    for seeded in itertools.count():
        for (engine, version), dtype, size in itertools.product(ENGINES, ("fp32", "bf16"), (2, 4)):
            for stage, law in itertools.product(range(4), LAWS.values()):
                for model in law.models[:2]:
                    yield Cell(law.name, engine, stage, size, dtype, model, f"s{seeded}" if seeded else ""), version


def make_record(cell: Cell, version: str, chance: random.Random, bad: float) -> Record:
    """Invent one record with a random outcome."""
    drawn = chance.random()
    if drawn < bad:
        return failed(cell, version, chance)
    plain = Record(cell, 0, Verdict.PASS, version, "2.13.0+cpu", seconds=0.5, tier="S", ratio=chance.random() / 2)
    line = {**plain.as_json(), "smallest": 1.8e-7, "wrong_elements": 1, "elements": 2096, "undetermined": 0}
    if drawn < bad + 0.08:
        line |= {"verdict": "unsupported", "tier": None, "ratio": None, "cause": "not claimed: the engine says so"}
    elif drawn < bad + 0.12:
        line |= {"verdict": "crash", "cause": "rank 0 raised KeyError: 'x'", "excuse": "deepspeedai/DeepSpeed#7352"}
    elif drawn < bad + 0.14:
        line |= {"verdict": "contract", "cause": "it divides", "documented": "https://example.org/doc", "excuse": "doc"}
    return parse_record(json.dumps(line))


def failed(cell: Cell, version: str, chance: random.Random | None = None) -> Record:
    """Invent a record of a wrong number, with every kind of evidence."""
    divergence = {
        "step": 1, "part": "reduction", "parameter": "blocks.3.mlp.weight", "index": [17, 40], "owner": 1,
        "offset": 136, "seen_on": 0, "expected": 0.25, "actual": 0.125, "bound": 1e-7, "ulps": 8388608, "wrong": 96,
        "total": 6144, "hint": "it is the contribution of rank 0 alone",
    }  # fmt: skip
    plain = Record(cell, 0, Verdict.FAIL, version, "2.13.0+cpu", seconds=1.5, tier="S", ratio=1.2e6, cause=CAUSE)
    line = {**plain.as_json(), "smallest": 1.8e-7, "wrong_elements": 1, "elements": 6144, "undetermined": 3}
    evidence = exhibit(chance or random.Random(1))  # noqa: S311
    return parse_record(json.dumps({**line, "divergence": divergence, "evidence": evidence}))


def exhibit(chance: random.Random) -> dict[str, Any]:
    """Invent the evidence of a shard with wrong rows."""
    values: list[list[float | str]] = [
        [round(chance.random() * 0.4, 2) if row < 8 else round(10 ** (6 * chance.random()), 1) for _ in range(48)]
        for row in range(16)
    ]
    values[9][3] = "inf"
    return {
        "parameter": "blocks.3.mlp.weight",
        "part": "reduction",
        "step": 1,
        "shape": list(SHAPE),
        "heat": {"rows": 16, "columns": 48, "block": [4, 2], "values": values},
        "shards": [{"rank": rank, "start": rank * 3120, "stop": min(6144, (rank + 1) * 3120)} for rank in (0, 1)],
        "ulps": {
            "edges": CLASS_LABELS,
            "engine": [int(900 / (i + 1)) for i in range(len(CLASS_LABELS) - 1)] + [2500],
            "baseline": [3000, 2000, 800, 200, 40] + [0] * (len(CLASS_LABELS) - 5),
        },
        "layers": [
            {"name": name, "ratio": round(0.1 + chance.random() * 0.4, 3) if i < 11 else round(900.0 * i, 1)}
            for i, name in enumerate(LAYERS)
        ],
        "curves": {
            "loss": {
                "engine": [1 / (i + 1) + 0.05 * i * (i > 2) for i in STEPS],
                "baseline": [1 / (i + 1) for i in STEPS],
            },
            "norm": {"engine": [2 - 0.1 * i * (i < 4) for i in STEPS], "baseline": [2 - 0.1 * i for i in STEPS]},
        },
    }  # fmt: skip
