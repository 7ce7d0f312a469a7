"""Build the any-order laws, which run a random program of calls (verbs) of the engine and judge after every call.

The program is drawn from the cell's seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.given_programs import ProgramCell, ProgramForm, split_variant
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.program_executor import observe_program
from zharness.law_kit.program_features import find_required_features
from zharness.law_kit.program_judge import ProgramJudge, run_judge
from zharness.law_kit.program_templates import TEMPLATES_BY_MODEL, ProgramTemplate
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Comparison, Tier
from zharness.workload.legal_programs import legal_verbs, program_cuts
from zharness.workload.program_text import parse_verb
from zharness.workload.programs import Verb, join_words


def observe_any_order(ctx: RankContext) -> None:
    """Run the program drawn from the cell's seed, and record its verbs and their results.

    The ranks' random generators differ while the program runs.
    """
    name, _ = split_variant(ctx.variant)
    cell = ProgramCell(ctx.spec.name, name, ctx.seed, ctx.config.dtype, ctx.capabilities)
    program_text, template = VERB_PROGRAMS.choose(ctx.variant, cell), get_template(cell.model, ctx.variant)
    program = template.make_program_of_verbs(parse_verbs(program_text), cell.dtype)
    ctx.record("verbs", {"text": torch.tensor([*program_text.encode()], dtype=torch.uint8)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.rank)
        ctx.record("switches", read_process_state(), 0)
        observe_program(ctx, program, template.other_engine_count)
        ctx.record("switches", read_process_state(), 1)


def judge_any_order(ctx: JudgeContext, judge_class: type[ProgramJudge] = ProgramJudge) -> Iterator[Comparison]:
    """Judge every verb of the program, and check that the program did not change the process's global settings."""
    template = get_template(ctx.baseline.spec.name, ctx.variant)
    verbs = parse_verbs(bytes(ctx.rank_records("verbs")[0]["text"].tolist()).decode())
    for comparison in run_judge(judge_class(ctx, template.make_program_of_verbs(verbs))):
        yield add_program_hint(comparison, verbs)
    yield from compare_process_state(ctx, "switches", range(2))


def get_template(model: str, variant: str) -> ProgramTemplate:
    """Return the template of the programs of a law variant, whose name may give a program."""
    return TEMPLATES_BY_MODEL[model][split_variant(variant)[0]]


def parse_verbs(program_text: str) -> tuple[Verb, ...]:
    """Return the verbs of a program. Raises UsageError for a word that is no verb."""
    return tuple(map(parse_verb, program_text.split()))


def draw_verbs(cell: ProgramCell) -> str:
    """Return the program that the seed of a cell draws."""
    template = get_template(cell.model, cell.variant)
    return join_words(template.make_program(cell.seed, cell.dtype, cell.claims).verbs)


def make_verbs_legal(cell: ProgramCell, program_text: str) -> str:
    """Return the verbs that plain PyTorch allows in their order, or '' if the engine does not claim their features."""
    template = get_template(cell.model, cell.variant)
    verbs = legal_verbs((), parse_verbs(program_text), window=template.window)
    needed = find_required_features(template.make_program_of_verbs(verbs, cell.dtype))
    return "" if any(cell.claims.refusal(feature) is not None for feature in needed) else join_words(verbs)


def cut_verbs(cell: ProgramCell, program_text: str) -> Iterator[str]:
    """Yield versions of the program without some of its verbs, and versions without one mark."""
    program = get_template(cell.model, cell.variant).make_program_of_verbs(parse_verbs(program_text), cell.dtype)
    yield from (join_words(smaller.verbs) for smaller in program_cuts(program))


VERB_PROGRAMS = ProgramForm(draw_verbs, make_verbs_legal, cut_verbs)


def add_program_hint(comparison: Comparison, verbs: Sequence[object]) -> Comparison:
    """Add a hint to a mismatch; the hint lists the verbs of the program up to the verb with the mismatch."""
    wrong = comparison.mismatch
    if wrong is None or not wrong.step:
        return comparison
    hint = f"{wrong.hint}; " * bool(wrong.hint) + f"at the end of {join_words(verbs[: wrong.step])!r}"
    return replace(comparison, mismatch=replace(wrong, hint=hint))


def any_order_law(
    group: str,
    statement: str,
    model: str,
    templates: Mapping[str, ProgramTemplate],
    *,
    kept_because: str,
    features: tuple[Feature, ...],
    dtypes: tuple[str, ...] = tuple(DTYPES),
    mesh_dtypes: tuple[str, ...] = (),
) -> Law:
    """Build the law ``group``.any_order with one law variant for each program template in ``templates``."""
    return Law(
        name=f"{group}.any_order",
        statement=statement,
        tier=Tier.STAGED,
        models=(model,),
        observe=observe_any_order,
        judge=judge_any_order,
        kept_because=kept_because,
        features=features,
        variants=tuple(Variant(name, template.features) for name, template in templates.items()),
        dtypes=dtypes,
        mesh_dtypes=mesh_dtypes,
        weights_stay_integers=False,
        programs=VERB_PROGRAMS,
    )
