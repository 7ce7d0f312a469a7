"""Define the any-order laws of meshes: a random program of calls on models that tp, cp and ep split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.program_exact import ExactProgramJudge
from zharness.law_kit.program_law import VERB_PROGRAMS, judge_any_order, observe_any_order
from zharness.law_kit.program_templates import CLIPPED_TEMPLATES, MESH_TEMPLATES, ProgramTemplate
from zharness.laws.mesh import mesh_law
from zharness.parity import Comparison


def judge_exact_program(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge every verb of the program bitwise, because its steps keep weights integers."""
    yield from judge_any_order(ctx, ExactProgramJudge)


def program_law(
    name: str, statement: str, models: tuple[str, ...], templates: Mapping[str, ProgramTemplate], kept_because: str
) -> Law:
    """Build a law of programs on a mesh, with one variant for each template of ``templates``."""
    return mesh_law(
        name,
        statement,
        observe_any_order,
        judge_exact_program,
        Feature.PARAM_GROUPS,
        Feature.SCHEDULE,
        models=models,
        variants=tuple(Variant(variant, template.features) for variant, template in templates.items()),
        programs=VERB_PROGRAMS,
        kept_because=kept_because,
    )


LAWS = (
    program_law(
        "any_order",
        "in any legal order of calls, each call works as in plain PyTorch, also with layers that are split in pairs",
        ("stepped_heads", "stepped_context", "routed"),
        MESH_TEMPLATES,
        "the only random order of calls on models that tp, cp and ep split",
    ),
    program_law(
        "any_order_clipped",
        "in any legal order of calls, each step applies the clipped sum of all gradients since the previous step",
        ("stepped_sequence",),
        CLIPPED_TEMPLATES,
        "the only random order of calls with clipping on tp: torch cannot clip whole and split parameters together",
    ),
)
