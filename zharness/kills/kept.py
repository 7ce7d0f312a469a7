"""Why a check is kept that is no mutant's only killer, in one line; the first pattern that matches holds."""

from __future__ import annotations

from fnmatch import fnmatchcase

KEPT = {
    "training.grads": "the shortest law, and one that every engine can be held to: what it says is read first",
    "training.one_hot_rank": "bitwise on random weights, where a mean is only bounded, and names the rank that is lost",
    "training.trajectory": "several steps with groups, momentum and a schedule, where the others take one",
    "training.accumulation": "every owner and length of a window, over two boundaries",
    "training.loss_scale_power": "needs no baseline and no bound, so it holds with kernels that are not torch's",
    "training.sgd_step": "one step with a rate of 1, so that a wrong gradient is a wrong weight of the same size",
    "training.ranks_agree": "needs no baseline: it holds for a model that no other law can run",
    "training.config_invariance": "the only one that switches the engine's options",
    "training.sum_or_mean": "the only one that asks for both reductions",
    "training.no_sync": "the only one that puts synchronisation off",
    "training.several_backwards": "accumulation that no engine is told of: backwards without a step between them",
    "training.clip_and_norm": "the only one that clips below the norm and looks at it",
    "training.forward_alone": "forwards that train nothing, each in a mode of its own",
    "training.kernels": "it alone judges random weights where an engine's kernels are not torch's",
    "training.free_running": "it needs gradients and weights alone, of an engine that shows no optimizer state",
    "training.optimizers": "the only one that steps with optimizers and options beyond the default ones",
    "backward.*": "one spelling of torch's each: what hangs on an output or a loss breaks in some and not in others",
    "double_backward.*": "one use of a retained graph each: released engines fail in some and not in others",
    "torch_func.*": "one transform each: a Function may lack the rule for one of them alone",
    "checkpointing.*": "one shape of region each: they differ in how many graph tasks make up a backward",
    "precision.*": "one setting of precision each, which no other law switches on",
    "parameters.*": "one kind of parameter each, which no other model has",
    "state.*": "one way to save or load each, which no other law does",
    "resources.*": "counts what no number of training shows",
}


def reason_for(check: str) -> str:
    """The reason; the empty string where none is written."""
    return next((why for pattern, why in KEPT.items() if fnmatchcase(check, pattern)), "")
