"""List the variants of laws and the models on which they run, without those that a pinned law set leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from zharness.law_set import name_law_variant
from zharness.laws import Law
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run.covering_axes import CoveredLaw, Depth
from zharness.run.mesh_claims import applies_to_model
from zharness.workload import MODELS
from zharness.workload.user_model import is_user_model


def select_models(law: Law, requested_models: tuple[str, ...], mesh: Mesh = DEFAULT_MESH) -> Iterator[tuple[str, str]]:
    """Yield each requested model to which ``law`` applies on ``mesh``, with each variant of the law.

    Without a requested model, all models of the workload are considered.
    """
    for name in requested_models or MODELS:
        if is_user_model(name):
            yield from ((name, variant) for variant in law.user_model_variants)
        elif applies_to_model(law, name, mesh):
            yield from ((name, variant) for variant in law.workload_variants)


def list_covered_laws(law: Law, requested_models: tuple[str, ...], depth: Depth) -> Iterator[CoveredLaw]:
    """Yield what has to have a cell with each value at ``depth``: ``law``, or each variant of it.

    Nothing is yielded if the law has no cells on ``requested_models``; if that is empty, all models count.
    """
    subjects = list(select_models(law, requested_models))
    if depth is Depth.LAWS:
        if subjects:
            yield CoveredLaw(law, law.name, tuple(subjects))
        return
    for variant in dict.fromkeys(variant for _, variant in subjects):
        own = tuple(subject for subject in subjects if subject[1] == variant)
        yield CoveredLaw(law, name_law_variant(law.name, variant), own)


def leave_out(laws: Iterable[Law], left_out: Collection[str]) -> Iterator[Law]:
    """Yield each of ``laws`` without the variants whose names are in ``left_out``, if any other variant remains."""
    for law in laws:
        variants = tuple(each for each in law.variants if name_law_variant(law.name, each.name) not in left_out)
        if variants:
            yield law if len(variants) == len(law.variants) else replace(law, variants=variants)
