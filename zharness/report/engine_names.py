"""Name the engines of a report. All settings of a covering array have one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zharness.run.configuration import is_config_file
from zharness.run.record import Record


def name_engines(records: Iterable[Record]) -> Mapping[str, str]:
    """Return a mapping from the label of each engine in ``records`` to its name in the report.

    A label with an engine variant is its own name. If an engine has several variants that are not configuration files,
    as in a run with a covering array of settings, all of them are named ``engine{*}``.
    """
    variants: dict[str, dict[str, str]] = {}
    for record in records:
        if record.cell.engine_variant and not is_config_file(record.cell.engine_variant):
            variants.setdefault(record.cell.engine, {})[record.cell.engine_label] = f"{record.cell.engine}{{*}}"
    return {label: name for labels in variants.values() if len(labels) > 1 for label, name in labels.items()}
