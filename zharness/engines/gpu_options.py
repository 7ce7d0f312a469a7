"""Define the options about GPUs that torch's engines share: compiled models, fused optimizers and pinned memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from zharness.device import is_gpu_requested
from zharness.engines import optimizers
from zharness.engines.capabilities import EngineOption
from zharness.engines.protocol import OptimizerSpec
from zharness.errors import ConfigError
from zharness.torch_private import compile_in_this_process

COMPILE, FUSED = "compile", "fused_optimizer"
INDUCTOR, CAPTURE, GRAPHS = "inductor", "eager", "cudagraphs"
BACKENDS = (INDUCTOR, CAPTURE, GRAPHS)
GPU_OPTIONS = {
    COMPILE: "'inductor': run the model under torch.compile; 'eager': let torch.compile capture graphs and run torch's "
    "own kernels; 'cudagraphs': replay torch's own kernels from CUDA graphs; default none",
    FUSED: "give the optimizer fused=True where it has that argument: one kernel for all weights; default false",
}
NO_GPU = "a CPU has no pinned memory, so that the option would change nothing; with --device cuda it runs"
NO_GRAPHS = "a CPU has no CUDA graphs, so that torch's own kernels would run without them; with --device cuda it runs"
# Laws of ordinary forwards and backwards. A graph is compiled for each model and shape, which takes seconds.
CAPTURED_LAWS = frozenset(
    {"training.grads", "training.kernels", "training.no_sync", "training.sgd_step", "training.trajectory"}
)
# A graph is recorded in the second call of an engine and replayed from the third one on.
REPLAYED_LAWS = frozenset({"training.trajectory"})
COMPILED_LAWS = frozenset({"training.grads", "training.kernels"})
COMPILE_REASON = "each model is compiled, which takes seconds, and the other laws change the graph in every call"
# Laws whose optimizer has a fused form that rounds as the laws' formula allows.
FUSED_LAWS = frozenset({"training.sgd_step", "training.clip_and_norm", "state.resume-adamw"})
FUSED_REASON = (
    "the other laws use another optimizer, or replay Adam's unfused operations, from which a kernel may differ"
)


@cache
def missing_for_inductor() -> str:
    """Return why a cell cannot compile its model, or '' if it can."""
    if not is_gpu_requested():
        return "on a CPU torch.compile builds C++ for each model, a minute on two cores; the option captured runs there"
    return "" if find_spec("triton") else "torch.compile needs triton on a GPU (pip install triton)"


@cache
def missing_for_graphs() -> str:
    """Return why a cell cannot replay its model from CUDA graphs, or '' if it can."""
    return "" if is_gpu_requested() else NO_GRAPHS


def shared_options(
    fused_laws: frozenset[str] = FUSED_LAWS, fused_reason: str = FUSED_REASON
) -> dict[str, EngineOption]:
    """Return the options of DDP and FSDP2; ``fused_laws`` are the laws whose optimizer the engine can fuse."""
    return {
        "captured": EngineOption({COMPILE: CAPTURE}, laws=CAPTURED_LAWS, laws_reason=COMPILE_REASON),
        "compiled": EngineOption(
            {COMPILE: INDUCTOR},
            absent=missing_for_inductor(),
            changes_numbers="kernels that torch.compile fuses round elsewhere",
            own_kernels="torch.compile fuses kernels",
            laws=COMPILED_LAWS,
            laws_reason=COMPILE_REASON,
        ),
        "cuda_graphs": EngineOption(
            {COMPILE: GRAPHS},
            absent=missing_for_graphs(),
            changes_numbers="AOTAutograd derives the backward, which may add its sums in another order",
            own_kernels="AOTAutograd derives the backward",
            laws=REPLAYED_LAWS,
            laws_reason="the other laws call an engine once or twice, and graphs are replayed from the third call on",
        ),
        "fused_optimizer": EngineOption(
            {FUSED: True},
            changes_numbers="a fused kernel contracts the multiplications and additions of an update",
            laws=fused_laws,
            laws_reason=fused_reason,
        ),
    }


def compile_in_place(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Compile later calls of ``module`` if an option asks for it. Raises ConfigError for an unknown value.

    Returns whether an option asks for it; the caller then drops the compiled graphs when the engine is closed.
    """
    backend = options.get(COMPILE)
    if backend is None:
        return False
    if backend not in BACKENDS:
        raise ConfigError.unknown_name(COMPILE, backend, BACKENDS)
    if backend == INDUCTOR:
        compile_in_this_process()
    module.compile(backend=backend)
    return True


def drop_compiled_graphs() -> None:
    """Drop the graphs that torch.compile keeps, which hold the models."""
    torch.compiler.reset()


def build_fused_optimizer(params: Mapping[str, Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Build the optimizer of ``spec`` with ``fused=True``, if its class has that argument."""
    kind = optimizers.optimizer_class(spec.name)
    fused = {"fused": True} if "fused" in inspect.signature(kind).parameters else {}
    return kind(optimizers.param_groups(params, spec), **{**spec.args, **fused})
