"""The laws of torch_autocast, and what all laws of precision look at: dtypes, local gradients, the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench, number
from zharness.checks.law import Check
from zharness.checks.optimizer_step import norm_told
from zharness.checks.single_step import evaluating
from zharness.checks.switches import left_alone, switches
from zharness.checks.trial import Trial
from zharness.engines.protocol import Absent, Engine, Feature, OptimizerSpec
from zharness.errors import EngineContractError
from zharness.parity import Comparison, Part, Tier, identical, ranks_agree, within
from zharness.parity.attribution import Terms
from zharness.parity.baseline import Baseline, Local
from zharness.parity.bounds import mean_and_bound, unit_roundoff
from zharness.workload import ModelSpec
from zharness.workload.foreign import is_foreign

LOW, WIDE = torch.bfloat16, torch.float32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
SAFE: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
AUTOCAST: Mapping[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
SGD = OptimizerSpec(name="sgd", args={"lr": 0.05, "momentum": 0.5})


def kind(tensor: Tensor) -> Tensor:
    """A tensor's dtype as a number that can be recorded and compared."""
    return number(DTYPES.index(tensor.dtype))


def same(trial: Trial, name: str, part: Part, expected: Tensor, actual: Tensor, rank: int) -> Iterator[Comparison]:
    """Bitwise, and of the same dtype."""
    yield identical(trial.place(name, part, seen_on=rank), kind(expected), kind(actual))
    found = actual if actual.is_floating_point() else actual.double()
    yield identical(trial.place(name, part, seen_on=rank), expected, found)


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The dtype of every module's output, by its path, in the forwards of the block; its hooks are called there."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            seen[name] = kind(output)

        return keep

    hooks = [each.register_forward_hook(watch(name)) for name, each in module.named_modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def local(
    trial: Trial,
    rank: int,
    forward: bool = True,
    backward: bool = False,
    micro: int = 0,
    params: Mapping[str, Tensor] | None = None,
) -> Local:
    """The plain model's micro-batch ``micro``: forward and backward inside torch.autocast or not, the loss never."""
    plain = replace(trial.baseline, autocast=LOW if forward else None, autocast_backward=LOW if backward else None)
    return plain.local(rank, micro, params)


def everyone(trial: Trial, forward: bool = True, backward: bool = False) -> list[Local]:
    return [local(trial, rank, forward, backward) for rank in range(trial.world_size)]


def lowered(baseline: Baseline, safe: tuple[type[nn.Module], ...]) -> set[str]:
    """The trained parameters that lie in modules of the classes ``safe``, if under another name as well."""
    model = baseline.spec.model(baseline.seed)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if type(module) in safe and p.requires_grad
    }


def reduced(trial: Trial, label: str, locals_: Sequence[Local], low: set[str]) -> Iterator[Comparison]:
    """Gradients are the mean over ranks within the rounding of their own wire: bf16 for those in ``low``, else fp32."""
    copies = trial.copies(label)
    for name in locals_[0].grads:
        dtype = LOW if name in low else WIDE
        held, terms = [copy[name] for copy in copies], [[one.grads[name]] for one in locals_]
        right = replace(trial, wire=dtype).right_in_pieces(name, terms, held)
        yield from right or wholly(trial, name, terms, held, dtype)
        yield from ranks_agree(trial.place(name, Part.REDUCTION), held)


def wholly(trial: Trial, name: str, terms: Terms, held: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Comparison]:
    """Every rank's copy of one gradient against the mean of ``terms``, reduced in ``dtype``."""
    mean, bound = mean_and_bound([term.double() for (term,) in terms], dtype)
    for rank, copy in enumerate(held):
        yield within(trial.place(name, Part.REDUCTION, seen_on=rank), mean, copy, bound)


def observe_policy(bench: Bench) -> None:
    engine = bench.engine(optimizer=SGD, options=AUTOCAST)
    evaluate(bench, engine, BEFORE)
    with outputs_of(engine.module) as dtypes:
        loss = bench.loss(engine, 0)
    bench.record("dtypes", dtypes)
    engine.backward(loss)
    bench.record("grads", engine.full_grads())
    engine.step()
    state = {f"{name}/{key}": t for name, kept in engine.full_optimizer_state().items() for key, t in kept.items()}
    kept = {**engine.full_params(), **state}
    bench.record("kept", {name: kind(tensor) for name, tensor in kept.items() if tensor.is_floating_point()})
    engine.zero_grad()
    bench.record("params", engine.full_params())
    evaluate(bench, engine, AFTER)
    bench.loss(engine, AFTER + 1)
    engine.close()


BEFORE, AFTER = 1, 2  # the micro-batches of evaluations before a step and after it


def evaluate(bench: Bench, engine: Engine, micro: int) -> None:
    """A forward that trains nothing, and the dtypes of what its modules gave."""
    with evaluating(engine), torch.no_grad(), outputs_of(engine.module) as dtypes:
        bench.loss(engine, micro)
    bench.record("dtypes", dtypes, micro)


def judge_policy(trial: Trial) -> Iterator[Comparison]:
    model, batch = trial.baseline.module(), trial.baseline.batch(0, 0)
    with outputs_of(model) as dtypes, torch.autocast("cpu", LOW):
        model(batch.inputs)
    ranks = range(trial.world_size)
    for micro in (BEFORE, 0):
        yield from trial.same_value("dtypes", [dtypes for _ in ranks], micro)
    yield from trial.same_loss(BEFORE, [local(trial, rank, micro=BEFORE) for rank in ranks])
    expected = everyone(trial)
    yield from trial.same_loss(0, expected)
    yield from reduced(trial, "grads", expected, lowered(trial.baseline, SAFE))
    for rank, copy in enumerate(trial.copies("kept")):
        for name, found in copy.items():
            yield identical(trial.place(name, Part.OPTIMIZER, seen_on=rank), kind(torch.zeros((), dtype=WIDE)), found)
    yield from trial.same_value("dtypes", [dtypes for _ in ranks], AFTER)
    for micro in (AFTER, AFTER + 1):
        stepped = [local(trial, rank, micro=micro, params=trial.copies("params")[rank]) for rank in ranks]
        yield from trial.same_loss(micro, stepped)


STATES = [(forward, backward) for forward in (True, False) for backward in (True, False)]


def states_of(spec: ModelSpec) -> Sequence[tuple[bool, bool]]:
    """Whether forward and backward run under autocast.

    Of anyone's model, of which a pass may take minutes, without the state that training.grads has: neither.
    """
    return [state for state in STATES if any(state) or not is_foreign(spec.name)]


def observe_states(bench: Bench) -> None:
    for forward, backward in states_of(bench.spec):
        engine = bench.engine(optimizer=FROZEN, options=AUTOCAST if forward else {})
        loss = bench.loss(engine, 0, f"loss-{forward}-{backward}")
        with torch.autocast(bench.device.type, LOW, enabled=backward):
            engine.backward(loss)
        bench.record(f"grads-{forward}-{backward}", engine.full_grads())
        engine.close()


def judge_states(trial: Trial) -> Iterator[Comparison]:
    safe = lowered(trial.baseline, SAFE)
    for forward, backward in states_of(trial.baseline.spec):
        expected = everyone(trial, forward, backward)
        yield from trial.same_loss(0, expected, f"loss-{forward}-{backward}")
        yield from reduced(trial, f"grads-{forward}-{backward}", expected, safe if forward else set())


def observe_nested(bench: Bench) -> None:
    """A user's block around the engine's call: another dtype, none at all, and one where the engine has no section.

    At last a forward that raises.
    """
    device, inputs = bench.device.type, bench.batch(0).inputs
    engine = bench.engine(options=AUTOCAST)
    with torch.autocast(device, torch.float16):
        bench.record("other", {"output": engine(inputs)})
    with torch.autocast(device, enabled=False):
        bench.record("off", {"output": engine(inputs)})
    engine.close()
    engine = bench.engine()
    with torch.autocast(device, LOW):
        bench.record("alone", {"output": engine(inputs)})
    engine.close()
    engine = bench.engine(options=AUTOCAST)
    bench.record("switches", switches(), 0)
    with suppress(InterruptedError):
        engine(inputs, through=interrupted)
    bench.record("switches", switches(), 1)
    engine.close()


def interrupted(hidden: Tensor) -> Tensor:
    """In the middle of a forward: raises."""
    raise InterruptedError


def judge_nested(trial: Trial) -> Iterator[Comparison]:
    for rank in range(trial.world_size):
        with torch.autocast("cpu", LOW):
            expected = trial.baseline.module()(trial.baseline.batch(rank, 0).inputs).detach()
        for label in ("other", "off", "alone"):
            found = trial.copies(label)[rank]["output"]
            yield from same(trial, "loss", Part.FORWARD, expected, found, rank)
    yield from left_alone(trial, "switches", range(2))


def sent(engine: Engine) -> Mapping[str, int]:
    """Elements that the engine sent. Raises EngineContractError where it claims to count them and does not."""
    wire = engine.observe().wire
    if isinstance(wire, Absent):
        raise EngineContractError(f"observe().wire: {wire.reason}; expected elements by collective and dtype")
    return wire


def crossed(engine: Engine, kinds: tuple[str, ...]) -> dict[str, Tensor]:
    """Elements sent so far by the collectives ``kinds``, in bf16, in fp32, and in any other dtype of fp16's width."""
    found = dict.fromkeys(("bfloat16", "float32", "float16"), 0)
    for key, elements in sent(engine).items():
        collective, _, dtype = key.partition(" ")
        if collective in kinds and dtype in found:
            found[dtype] += elements
    return {name: number(count) for name, count in found.items()}


REDUCING = ("all_reduce", "reduce_scatter")
CUSTOM = {"torch_autocast": {**AUTOCAST["torch_autocast"], "lower_precision_safe_modules": ["torch.nn.LayerNorm"]}}
SAFE_LISTS: Mapping[str, tuple[Mapping[str, Any], tuple[type[nn.Module], ...]]] = {
    "": (AUTOCAST, SAFE),
    "custom": (CUSTOM, (nn.LayerNorm,)),
}


def observe_safe_modules(bench: Bench) -> None:
    options, _ = SAFE_LISTS[bench.variant]
    engine = bench.engine(optimizer=FROZEN, options=options)
    before = crossed(engine, REDUCING)
    engine.backward(bench.loss(engine, 0))
    if bench.config.stage == 3:
        bench.record("gathered", crossed(engine, ("all_gather",)))
    engine.step()
    after = crossed(engine, REDUCING)
    bench.record("reduced", {name: after[name] - before[name] for name in after})
    engine.close()


def judge_safe_modules(trial: Trial) -> Iterator[Comparison]:
    _, safe = SAFE_LISTS[trial.variant]
    spec = trial.baseline.spec
    low = lowered(trial.baseline, safe)
    sizes = {name: p.numel() for name, p in spec.model(0).named_parameters()}
    trained = {name for name, p in spec.model(0).named_parameters() if p.requires_grad}
    yield from each_once(trial, "reduced", sizes, {"bfloat16": low, "float32": trained - low, "float16": set()})
    if trial.recorded("gathered"):
        for rank, copy in enumerate(trial.copies("gathered")):
            place = trial.place("input", Part.GATHER, seen_on=rank)
            least = number(sum(sizes[name] for name in low & inside(spec)))
            yield identical(place, torch.maximum(least, copy["bfloat16"]), copy["bfloat16"])


def inside(spec: ModelSpec) -> set[str]:
    """What a forward under torch.autocast reads inside of it: not the layer that leaves it."""
    return {name for name, _ in spec.model(0).named_parameters() if not name.startswith("inner.")}


def each_once(
    trial: Trial, label: str, sizes: Mapping[str, int], by_dtype: Mapping[str, set[str]]
) -> Iterator[Comparison]:
    """In each dtype exactly the parameters named crossed the wire, each once, but for the padding of shards."""
    for rank, copy in enumerate(trial.copies(label)):
        for dtype, names in by_dtype.items():
            least = sum(sizes[name] for name in names)
            most = least + len(names) * (trial.world_size - 1)
            name = min(names, default="input")
            place = trial.place(name, Part.REDUCTION, seen_on=rank)
            yield identical(place, copy[dtype].clamp(least, most), copy[dtype])


def observe_norm(bench: Bench) -> None:
    engine = bench.engine(optimizer=FROZEN, options=AUTOCAST, clip=0.5)
    engine.backward(bench.loss(engine, 0))
    bench.record("grads", engine.full_grads())
    engine.step()
    norm = engine.grad_norm()
    bench.record("norm", {"norm": torch.tensor(float("nan") if norm is None else norm, dtype=torch.float64)})
    engine.close()


def judge_norm(trial: Trial) -> Iterator[Comparison]:
    """The triangle inequality: norms differ by no more than the norm of the difference, which is bounded by element."""
    expected, low = everyone(trial), lowered(trial.baseline, SAFE)
    yield from reduced(trial, "grads", expected, low)
    means, bounds = [], []
    for name in expected[0].grads:
        mean, bound = mean_and_bound([one.grads[name].double() for one in expected], LOW if name in low else WIDE)
        means.append(mean.flatten())
        bounds.append(bound.flatten())
    norm = torch.cat(means).norm()
    # The norm itself is a sum of squares in fp32 or wider, and a root.
    bound = torch.cat(bounds).norm() + norm * len(torch.cat(means)) * unit_roundoff(WIDE)
    for rank, copy in enumerate(trial.copies("norm")):
        yield norm_told(within(trial.place("norm", Part.OPTIMIZER, seen_on=rank), norm, copy["norm"], bound))


def check(
    name: str,
    law: str,
    observe: Callable[[Bench], None],
    judge: Callable[[Trial], Iterator[Comparison]],
    *variants: str,
    needs: Feature = Feature.AUTOCAST,
    any_model: tuple[str, ...] = (),
) -> Check:
    """A law of precision, on the model made for them."""
    return Check(
        name=f"precision.{name}",
        law=law,
        tier=Tier.STAGED,
        models=("mixed",),
        observe=observe,
        judge=judge,
        needs=(needs,),
        integral=False,
        dtypes=("fp32",),  # the checks choose the sections of precision themselves
        variants=tuple((variant, ()) for variant in variants) or (("", ()),),
        any_model=any_model,
    )


CHECKS = (
    check(
        "autocast_policy",
        "with torch_autocast all forwards run in torch.autocast's dtypes; weights, gradients and state stay fp32",
        observe_policy,
        judge_policy,
    ),
    check(
        "autocast_states",
        "forward with and without torch_autocast, backward inside and outside an outer one: the plain gradients",
        observe_states,
        judge_states,
        any_model=("",),
    ),
    check(
        "autocast_nested",
        "a user's torch.autocast around the engine yields to the section, works where there is none; none is left on",
        observe_nested,
        judge_nested,
    ),
    check(
        "safe_modules",
        "only parameters of lower_precision_safe_modules travel in the low dtype, each gradient once",
        observe_safe_modules,
        judge_safe_modules,
        *SAFE_LISTS,
        needs=Feature.WIRES,
    ),
    check(
        "autocast_norm",
        "the reported norm is that of the plain gradients under torch.autocast: bf16 has no loss scale",
        observe_norm,
        judge_norm,
        any_model=("",),
    ),
)
