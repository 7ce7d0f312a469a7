"""Mutants that lose or double the gradients of one backward if a step has several backwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import (
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
    pytorch,
)
from zharness.mutants.wrapper import EngineWrapper, HookedParameters, in_backward
from zharness.parity import Part


@mutant(
    FaultKind.CONTRIBUTION,
    Target("double_backward.retained_then_zero_grad"),
    origin=Origin.CONTRIBUTIONS,
    imitates=pytorch(47260),
)
class ReducesNoSecondBackward(EngineWrapper):
    """Does not reduce the gradients of a second backward on a retained graph; plain DDP does not reduce them either."""

    wraps = "ddp"


@mutant(
    FaultKind.CONTRIBUTION,
    Target("checkpointing.block", model="blocks", variant="reentrant"),
    Target("checkpointing.nested", model="blocks", variant="reentrant"),
    Target("checkpointing.two_regions", model="blocks", variant="reentrant"),
    Target("checkpointing.frozen", model="blocks", variant="reentrant"),
    Target("checkpointing.non_scalar", model="blocks", variant="reentrant"),
    Target("checkpointing.accumulation", model="blocks", variant="non_reentrant"),
    Target("backward.two_outputs_two_backwards", model="blocks"),
    Target("backward.backward_in_forward", model="blocks"),
    Target("backward.auxiliary_loss", model="blocks"),
    Target("double_backward.retained_same_loss", model="blocks"),
    Target("torch_func.inside_forward", model="blocks"),
    Target("parameters.used_on_some_ranks", model="changing"),
    Target("parameters.outside_its_module", model="changing"),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(7780),
)
class OnlyTheFirstBackwardCounts(HookedParameters):
    """Uses the gradients of the first backward of a step, and drops those of later or nested backwards."""

    first = -1

    def changed(self, grad: Tensor) -> Tensor:
        self.first = in_backward() if self.first == -1 else self.first
        return grad if in_backward() == self.first else torch.zeros_like(grad)

    def zero_grad(self) -> None:
        self.first = -1
        self.base.zero_grad()


@mutant(
    FaultKind.CONTRIBUTION,
    Target("double_backward.retained_then_zero_grad", Part.OPTIMIZER),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(8045),
)
class StepsOnTheFirstLoss(EngineWrapper):
    """After a retained backward, reports the gradient of the second loss, but steps with that of the first loss."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        if retain_graph:
            self.kept = {name: grad.clone() for name, grad in self.base.full_grads().items()}

    def step(self) -> None:
        reduced = seams.reduce_pending(self.base) if self.kept else {}
        for name, grad in self.kept.items():
            reduced[name].copy_(grad)
        self.kept = {}
        self.base.step()


@mutant(
    FaultKind.CONTRIBUTION,
    Target("double_backward.retained_then_zero_grad", variant="scale"),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(8045),
)
class LosesTheSecondManualBackward(EngineWrapper):
    """Multiplies each loss that ``scale`` returns by zero, except the first loss of a step."""

    scaled = 0

    def scale(self, loss: Tensor) -> Tensor:
        self.scaled += 1
        ready: Tensor = self.base.scale(loss)
        return ready * float(self.scaled == 1)

    def step(self) -> None:
        self.scaled = 0
        self.base.step()


@mutant(
    FaultKind.CONTRIBUTION,
    Target("double_backward.retained_then_zero_grad"),
    Target("double_backward.retained_then_zero_grad", model="exact", variant="tensor"),
    Target("backward.abort_and_retry", model="blocks"),
    Target("double_backward.retain_leaks_nothing", model="blocks"),
    Target("checkpointing.exception", model="blocks", variant="reentrant"),
    Target(
        "parameters.branch", None, model="changing", cause="['branch.weight', 'branch.bias'], which no rank's loss uses"
    ),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(8245),
)
class ZeroGradForgetsNothing(EngineWrapper):
    """Does nothing in ``zero_grad``, so that the gradients are kept."""

    def zero_grad(self) -> None:
        pass


@mutant(FaultKind.CONTRIBUTION, Target("training.any_order", Part.ACCUMULATION, variant="sums"), origin=Origin.ORDERS)
class ForgetsAtAFailedForward(EngineWrapper):
    """Drops the accumulated gradients if a forward raises."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.base(*args, **kwargs)
        except Exception:
            self.base.zero_grad()
            raise


@mutant(
    FaultKind.CONTRIBUTION,
    Target("backward.abort_and_retry", model="blocks"),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(8045),
)
class LeaksAFlagAfterAnException(EngineWrapper):
    """Doubles the gradients of the next backward after a backward that raised, because a flag stays set."""

    running = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.set_flag)  # type: ignore[no-untyped-call]
        return output

    def set_flag(self, grad: Tensor) -> Tensor:
        """Set the flag, and double the gradient if a backward that raised has left the flag set."""
        leaked = self.running not in (-1, in_backward())
        self.running = in_backward()
        torch_private.queue_backward_callback(self.clear_flag)
        return 2 * grad if leaked else grad

    def clear_flag(self) -> None:
        """Clear the flag; autograd calls this function at the end of a backward that does not raise."""
        self.running = -1


class _ReducedOnce(ReferenceEngine):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.done: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.done.clear()
        return super().__call__(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.done.clear()
        super().backward(loss, retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        self.done.clear()
        return super().scale(loss)


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("checkpointing.two_regions", model="blocks", variant="reentrant"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_2,
)
def second_arrival_is_dropped(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2, drops gradients of a parameter that was reduced since the last forward or ``engine.backward``.

    A parameter's gradient can be computed in several parts: by a module that a reentrant checkpoint runs twice, by a
    module that runs both inside and outside of a checkpoint, or by two losses of one forward. All parts but the first
    are lost.
    """
    engine = seams.build(model, config, _ReducedOnce)
    done = cast(_ReducedOnce, engine).done

    def wrap(reduce: Callable[[seams.Bucket, bool], bool]) -> Callable[[seams.Bucket, bool], bool]:
        def reduce_once(bucket: seams.Bucket, has_more: bool) -> bool:
            arrived = [param for param in bucket.members if param.parameter.grad is not None]
            for param in arrived:
                if param.name in done:
                    param.parameter.grad = None
            outcome = reduce(bucket, has_more)
            done.update(param.name for param in arrived)
            return outcome

        return reduce_once

    seams.wrap_reduce_bucket_if_used(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.accumulation", Part.ACCUMULATION, variant="caller"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_3,
)
def second_backward_dropped(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2, reduces each parameter once in a micro-batch, and drops all later gradients of the micro-batch.

    If two losses run backward one after the other before ``step``, or if a module is used both inside and outside of a
    reentrant checkpoint, only the first gradient is used.
    """
    engine, done = seams.build(model, config), dict[str, int]()

    def wrap_add(add: seams.AddGrad) -> seams.AddGrad:
        def add_once(param: seams.ModelParam, share: Tensor) -> None:
            if done.get(param.name) != seams.micro_batches(engine):
                done[param.name] = seams.micro_batches(engine)
                add(param, share)

        return add_once

    if config.stage == 2:
        seams.wrap_add_reduced(engine, wrap_add)
        seams.wrap_clear_grads(engine, lambda clear: partial(_clear_both, done, clear))
    return engine


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.several_backwards", Part.ACCUMULATION),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_6,
)
def one_gradient_per_forward(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2, reduces a parameter at most once until the next forward, and drops its later gradients.

    If two reentrant checkpoints share a weight, or if a retained graph has a second backward, the weight lacks
    gradients that plain PyTorch adds.
    """
    done = dict[str, int]()

    class Marking(ReferenceEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if in_backward() == -1:
                done.clear()
            return super().__call__(*args, **kwargs)

    def wrap_add(add: seams.AddGrad) -> seams.AddGrad:
        def add_once(param: seams.ModelParam, share: Tensor) -> None:
            if param.name not in done:
                done[param.name] = 1
                add(param, share)

        return add_once

    if config.stage != 2:
        return seams.build(model, config)
    engine = seams.build(model, config, Marking)
    seams.wrap_add_reduced(engine, wrap_add)
    seams.wrap_clear_grads(engine, lambda clear: partial(_clear_both, done, clear))
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("checkpointing.block", None, model="blocks", variant="reentrant", cause="missing ['last.weight']"),
    wraps="reference",
    stages=(2,),
    origin=Origin.BLIND_1,
)
def reentrant_end_drops_outer(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 2, treats the end of a reentrant checkpoint's backward as the end of the whole backward.

    All buckets are cleared at this point, so gradients that the outer backward has put into a bucket that is not yet
    full are lost.
    """
    engine, task_of = seams.build(model, config), dict[nn.Parameter, int]()

    def wrap_ready(on_grad_ready: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
        def record_task(parameter: nn.Parameter) -> None:
            task_of[parameter] = in_backward()
            on_grad_ready(parameter)

        return record_task

    def wrap_end(end: Callable[[int], None]) -> Callable[[int], None]:
        def drop_outer(task: int) -> None:
            if any(other < task for other in seams.running_graph_tasks(engine)):
                for parameter in seams.pending_params(engine):
                    if task_of[parameter] != task:
                        parameter.grad = None
            end(task)

        return drop_outer

    seams.wrap_grad_ready(engine, wrap_ready)
    seams.wrap_backward_end(engine, wrap_end)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("backward.autograd_grad", None, model="blocks", cause="full_grads has gradients of"),
    wraps="reference",
    stages=(0, 1),
    origin=Origin.BLIND_3,
)
def autograd_grad_counts(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 and 1, collects gradients by tensor hooks on the parameters, which every use of autograd runs.

    Parameter gradients that ``torch.autograd.grad`` computes are used in the step as well; in plain PyTorch such
    gradients do not change ``.grad``.
    """
    engine, caught = seams.build(model, config), dict[str, list[Tensor | None]]()

    def catch(name: str, grad: Tensor | None) -> None:
        plain = grad is not None and not torch_private.is_legacy_batched(grad) and not torch_private.is_transforming()
        caught.setdefault(name, []).append(grad.detach() if grad is not None and plain else None)

    def release(name: str, _parameter: nn.Parameter) -> None:
        if caught.get(name):
            caught[name].pop()  # this gradient is also in .grad

    def wrap(reduce_pending: seams.ReducePending) -> seams.ReducePending:
        def reduce_with_caught() -> dict[str, Tensor]:
            for name, grads in caught.items():
                parameter = seams.model_params(engine)[name].parameter
                for grad in (each for each in grads if each is not None):
                    parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
            caught.clear()
            return reduce_pending()

        return reduce_with_caught

    if config.stage < 2:
        seams.wrap_reduce_pending(engine, wrap)
        seams.wrap_clear_grads(engine, lambda clear: partial(_clear_both, caught, clear))
        for name, parameter in ((n, param.parameter) for n, param in seams.model_params(engine).items()):
            if parameter.requires_grad:
                hooks = seams.grad_hooks(engine)  # the engine removes these hooks in close
                hooks.append(parameter.register_hook(partial(catch, name)))  # type: ignore[no-untyped-call]
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(release, name)))  # type: ignore
    return engine


def _clear_both(own: dict[str, Any], clear_grads: Callable[[], None]) -> None:
    """Clear ``own``, a table of the mutant, together with the engine's gradients."""
    own.clear()
    clear_grads()
