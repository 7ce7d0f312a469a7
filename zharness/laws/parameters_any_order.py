"""Define the any-order law for a model with tied, frozen and unused parameters.

The law runs a random program of calls (verbs) of the engine and compares the engine with plain PyTorch after every
call.
"""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.program_law import any_order_law
from zharness.law_kit.program_templates import CHANGING_TEMPLATES

LAWS = (
    any_order_law(
        "parameters",
        "in any legal order of calls, a model with tied, frozen and unused parameters trains as in plain PyTorch",
        "changing",
        CHANGING_TEMPLATES,
        kept_because="the only saves, loads and edits of parameters that a step may leave unused",
        features=(Feature.PARAMETERS, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        dtypes=("fp32",),  # the model mixes dtypes: its frozen layer stays in fp32 in every dtype
    ),
)
