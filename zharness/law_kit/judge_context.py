"""Define the context in which a law's judge compares the evidence of every rank with the baseline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zharness.engines.protocol import Capabilities, Feature
from zharness.errors import EngineContractError
from zharness.law_kit.default_training import DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.reduced_grads import ReducedGrad
from zharness.law_kit.setting import DEFAULT_SETTING, Setting
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.parity import Comparison, Part, RankEvidence, compare_bitwise, compare_ranks
from zharness.parity.attribution import GradientTerms, SuspectedGradients, fit_scale
from zharness.parity.baseline import Baseline, LocalResult, LossWeighting, Objective
from zharness.parity.bounds import (
    BoundedTensor,
    mean_and_bound,
    unit_roundoff,
)
from zharness.parity.certificate import NOT_EXACT, Exactness, as_exactness, certify_exactness
from zharness.parity.compare import (
    attach_plain_values,
    check_names,
)
from zharness.parity.comparison import TensorLocation
from zharness.parity.grad_parts import bound_orders

BoundedGrads = Mapping[str, BoundedTensor]  # gradients by parameter, with a bound on the engine's error
CLAIMS_EVERY_FEATURE = Capabilities(stages=frozenset())


@dataclass(frozen=True)
class JudgeContext:
    """The input of a law's judge: the evidence of every rank, and the baseline that the evidence has to match.

    ``evidence[rank]`` holds the tensors that this rank recorded. ``declared_reduce_dtype`` is the dtype in which the
    engine says that it reduces gradients; None means the cell's dtype. ``training`` is the training that the user
    configured. ``setting`` contains the cell's accumulation window; each micro-batch is repeated until the window is
    full. ``claims`` are the capabilities of the engine under the cell's options; the default claims every feature.
    ``mesh`` has the axes beside data parallelism. Ranks that differ only along tp, cp or pp share a micro-batch.
    """

    baseline: Baseline
    evidence: tuple[RankEvidence, ...]
    dtype: torch.dtype
    variant: str = ""
    declared_reduce_dtype: torch.dtype | None = None
    training: TrainingConfig = DEFAULT_TRAINING
    setting: Setting = DEFAULT_SETTING
    claims: Capabilities = CLAIMS_EVERY_FEATURE
    mesh: Mesh = DEFAULT_MESH

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which the engine reduces gradients: the declared dtype, or else the cell's dtype."""
        return self.declared_reduce_dtype or self.dtype

    def get_reduce_dtype(self, name: str, grad_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradients of the parameter ``name`` are reduced.

        ``grad_dtype`` is the dtype of the engine's gradient. If the parameter has this dtype in the model, and if the
        dtype is narrower than the cell's, the engine may reduce in this dtype.
        """
        narrow = grad_dtype == self.get_param_dtype(name) != self.dtype
        return max(self.reduce_dtype, grad_dtype, key=unit_roundoff) if narrow else self.reduce_dtype

    def get_param_dtype(self, name: str) -> torch.dtype:
        """Return the narrower of two dtypes: the cell's, and that of the parameter ``name`` in the model."""
        return max(self.dtype, self.baseline.parameter_dtypes[name], key=unit_roundoff)

    @property
    def data_size(self) -> int:
        """The number of data coordinates, which is the number of different micro-batches in one step."""
        return self.baseline.data_size

    @property
    def world_size(self) -> int:
        """The number of ranks that recorded evidence."""
        return len(self.evidence)

    def data_coordinate(self, rank: int) -> int:
        """Return the number of the micro-batch that ``rank`` got; ranks that differ only on tp, cp or pp share one."""
        return self.mesh.data_coordinate(rank, self.world_size)

    def rank_records(self, label: str, step: int = 0) -> list[Mapping[str, Tensor]]:
        """Return a list with the tensors that each rank recorded under ``label`` at ``step``."""
        return [evidence.get(label, step) for evidence in self.evidence]

    def has_record(self, label: str) -> bool:
        """Return whether rank 0 recorded anything under ``label``; ``rank_records`` raises if not all ranks did."""
        return any(snapshot.label == label for snapshot in self.evidence[0].snapshots)

    def location(self, name: str, part: Part, step: int = 0, rank: int = 0) -> TensorLocation:
        """Return a tensor's location and each rank's elements. Optimizer state has the layout of its parameter."""
        return TensorLocation(name, part, step, rank, tuple(self.evidence[rank].layout.get(name.partition("/")[0], ())))

    def compare_losses(self, step: int, expected: Sequence[LocalResult], label: str = "loss") -> Iterator[Comparison]:
        """Check that every rank's loss is bitwise equal to ``expected[data coordinate]`` on the same micro-batch."""
        for rank, record in enumerate(self.rank_records(label, step)):
            local = expected[self.data_coordinate(rank)].loss
            comparison = compare_bitwise(self.location("loss", Part.FORWARD, step, rank), local, record["loss"])
            yield attach_plain_values(comparison, partial(torch.clone, local))

    def compare_values(
        self, label: str, expected: Sequence[Mapping[str, Tensor]], step: int = 0
    ) -> Iterator[Comparison]:
        """Check that each rank's tensors under ``label`` are bitwise equal to ``expected[data coordinate]``."""
        for rank, record in enumerate(self.rank_records(label, step)):
            wanted = expected[self.data_coordinate(rank)]
            check_names(label, wanted, record)
            for name, tensor in wanted.items():
                comparison = compare_bitwise(self.location(name, Part.LOCAL_GRADIENT, step, rank), tensor, record[name])
                yield attach_plain_values(
                    add_scale_hint(comparison, tensor, record[name]), partial(torch.clone, tensor)
                )

    def compare_reduced_grads(
        self,
        label: str,
        micros: Sequence[Sequence[LocalResult]],
        step: int = 0,
        exact: bool | Exactness = False,
        scale: float = 1.0,
        suspects: Mapping[str, Sequence[Sequence[LocalResult]]] | None = None,
        explain: bool = True,
    ) -> Iterator[Comparison]:
        """Compare every rank's full gradients with ``scale`` times the mean of all local gradients, and between ranks.

        ``micros[m][at]`` is the baseline's result on micro-batch m of data coordinate ``at``. If ``exact`` is true, the
        comparison is bitwise. Otherwise it uses the rounding error bound of the reduction, and the note of the
        comparison says why tier X does not apply. ``suspects[hint][loss]`` holds other local gradients; if a wrong
        gradient equals their sum, the mismatch gets ``hint``. If ``explain`` is false, this method does not search for
        hints, because the search takes many comparisons for a large gradient.
        """
        records = self.rank_records(label, step)
        expected = {name for row in micros for local in row for name in local.grads}
        for record in records:
            self.check_gradient_names(expected, record)
        for name in self.baseline.parameter_names:
            if name in expected:
                suspected_grads = {
                    hint: [[local.grads[name] for local in row if name in local.grads] for row in losses]
                    for hint, losses in (suspects or {}).items()
                }
                yield from self._compare_reduced_grad(
                    name, records, micros, step, as_exactness(exact), scale, suspected_grads if explain else None
                )

    def check_gradient_names(self, expected: Collection[str], record: Mapping[str, Tensor]) -> None:
        """Raise EngineContractError unless ``record`` has the gradients ``expected``, those of used parameters.

        An engine that refuses Feature.NO_GRADIENT may also have zeros for parameters that no rank used.
        """
        names = self.baseline.parameter_names
        extra = [name for name in record if name in names and name not in expected]
        if extra and self.claims.refusal(Feature.NO_GRADIENT) is None:
            raise EngineContractError(
                f"full_grads has gradients of {extra}, which no rank's loss uses; plain PyTorch leaves them None. "
                "An engine that fills them with zeros refuses Feature.NO_GRADIENT"
            )
        wrong = [name for name in extra if bool(record[name].count_nonzero())]
        if wrong:
            raise EngineContractError(f"full_grads has gradients of {wrong} that are not zero, but no rank's loss uses")
        check_names("full_grads", dict.fromkeys([*expected, *extra]), record)

    def compute_expected_grads(
        self, micros: Sequence[Sequence[LocalResult]], scale: float, grad_dtypes: Mapping[str, torch.dtype]
    ) -> BoundedGrads:
        """Return the gradients, with error bounds, that ``compare_reduced_grads`` would expect from the engine.

        ``grad_dtypes`` maps the names of parameters to the dtypes of the engine's gradients. If a parameter has no
        entry, the dtype of ``get_param_dtype`` is used.
        """
        bounded_grads = {}
        for name in self.baseline.parameter_names:
            if any(name in local.grads for row in micros for local in row):
                dtype = grad_dtypes.get(name, self.get_param_dtype(name))
                terms = [scale * term.double() for row in self._collect_local_grads(name, micros) for term in row]
                mean, bound = mean_and_bound(terms, self.get_reduce_dtype(name, dtype), dtype)
                bounded_grads[name] = BoundedTensor(mean, bound + scale * bound_orders(name, micros), dtype)
        return bounded_grads

    def _collect_local_grads(self, name: str, micros: Sequence[Sequence[LocalResult]]) -> list[list[Tensor]]:
        """Return one parameter's local gradients as ``[rank][micro-batch]``, with zeros for ranks that did not use it.

        Each micro-batch occurs ``accumulation_steps`` times, as often as ``RankContext.backward`` runs it.
        """
        return [
            [get_grad_or_zeros(row[rank], name, micros) for row in micros] * self.setting.accumulation_steps
            for rank in range(self.data_size)
        ]

    def _compare_reduced_grad(
        self,
        name: str,
        records: Sequence[Mapping[str, Tensor]],
        micros: Sequence[Sequence[LocalResult]],
        step: int,
        exactness: Exactness,
        scale: float,
        suspects: SuspectedGradients | None,
    ) -> Iterator[Comparison]:
        """Compare one parameter's reduced gradient with the expected gradient on every rank, and between ranks."""
        grad = self.build_reduced_grad(
            name, self._collect_local_grads(name, micros), [record[name] for record in records], step, exactness, scale
        )
        yield from grad.compare(suspects, scale * bound_orders(name, micros))
        yield from compare_ranks(self.location(name, Part.REDUCTION, step), grad.rank_grads)

    def build_reduced_grad(
        self,
        name: str,
        local_grads: GradientTerms,
        rank_grads: Sequence[Tensor],
        step: int = 0,
        exactness: Exactness = NOT_EXACT,
        scale: float = 1.0,
    ) -> ReducedGrad:
        """Return the gradients of the parameter ``name`` on all ranks, with the local gradients for a comparison."""
        return ReducedGrad(
            lambda rank: self.location(name, Part.REDUCTION, step, rank),
            local_grads,
            rank_grads,
            self.get_reduce_dtype(name, rank_grads[0].dtype),
            exactness=exactness,
            scale=scale,
            loss_scale=self.baseline.loss_scale,
        )

    def certify_exactness(self, steps: range, objective: Objective | None = None) -> Exactness:
        """Return whether tier X applies to the mean of the gradients of these micro-batches, and if not, the reason."""
        narrowest = max(self.dtype, self.reduce_dtype, key=unit_roundoff)
        return certify_exactness(self.baseline, steps, narrowest, objective, repeats=self.setting.accumulation_steps)

    def has_single_reduction_order(self) -> bool:
        """Return whether the mean over ranks is the same in every order of summation.

        This is the case if there are at most two ranks, or if the sums do not round.
        """
        return self.data_size <= 2 or bool(self.certify_exactness(range(1)))

    def compute_local_grads(
        self,
        step: int = 0,
        params: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        weigh: LossWeighting | None = None,
    ) -> list[LocalResult]:
        """Return the loss and local gradients that the baseline computes on micro-batch ``step``, for each rank.

        In a cell whose caller accumulates, backward starts from the loss divided by the size of the accumulation
        window, and the gradients are multiplied by it afterwards. The quotients of small fp16 gradients underflow, so
        these gradients differ from those of the undivided loss.
        """
        divisor = self.setting.loss_divisor
        if divisor == 1:
            return self.baseline.run_all_ranks(step, params, objective, weigh)

        def divide(loss: Tensor, rank: int) -> Tensor:
            """Return the part of the loss from which one backward of the accumulation window starts."""
            return (loss if weigh is None else weigh(loss, rank)) / divisor

        return [
            LocalResult(result.loss, {name: divisor * grad for name, grad in result.grads.items()})
            for result in self.baseline.run_all_ranks(step, params, objective, divide)
        ]


def stop_at_first_mismatch(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """Yield comparisons up to and including the first mismatch, which may have caused all later mismatches."""
    for comparison in comparisons:
        yield comparison
        if comparison.mismatch is not None:
            return


def get_grad_or_zeros(local: LocalResult, name: str, micros: Sequence[Sequence[LocalResult]]) -> Tensor:
    """Return one rank's gradient of the parameter ``name``, or zeros if only other ranks used the parameter."""
    if name in local.grads:
        return local.grads[name]
    other = next(peer.grads[name] for row in micros for peer in row if name in peer.grads)
    return torch.zeros_like(other)


def add_scale_hint(comparison: Comparison, expected: Tensor, actual: Tensor) -> Comparison:
    """If a mismatch could come from one wrong factor on all elements, add a hint with this factor."""
    if comparison.mismatch is None or expected.numel() == 1 or not actual.is_floating_point():
        return comparison
    factor = fit_scale(actual, [expected])
    hint = "" if factor is None else f"it is {factor:.7g} x the right value"
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))


def divide_loss_by(divisor: int) -> LossWeighting:
    """Return a function that divides a rank's loss by ``divisor``, as a user's training loop does."""
    return lambda loss, _rank: loss / divisor
