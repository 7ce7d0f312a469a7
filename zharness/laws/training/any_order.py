"""Define the any-order law for ordinary training.

The law runs a random program of calls (verbs) of the engine and compares the engine with plain PyTorch after every
call.
"""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.program_law import any_order_law
from zharness.law_kit.program_templates import MLP_TEMPLATES

LAWS = (
    any_order_law(
        "training",
        "in any legal order of calls, each call has the same effect as in plain PyTorch",
        "mlp",
        MLP_TEMPLATES,
        kept_because="the only random order of calls, with engines of different settings in one process",
        features=(Feature.PARAM_GROUPS, Feature.SCHEDULE),
        mesh_dtypes=("bf16",),
    ),
)
