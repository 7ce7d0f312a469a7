"""DeepSpeed's AutoTP: cells that pass, cells that fail as FINDINGS.md says, plans that it cannot apply, and owners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from suites.mesh.cells import check_cell, find_refusal, start_runner
from zharness.engines.deepspeed_tensor_parallel import list_runs, tensor_parallel_section
from zharness.engines.protocol import EngineConfig, Piece
from zharness.errors import ConfigError
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run import Runner, Verdict

pytest.importorskip("deepspeed")

CELLS = {
    "mesh.training[deepspeed-zero0-w4.tp2-fp32-heads]": Verdict.PASS,
    "mesh.training[deepspeed-zero0-w4.tp2-fp32-mixing]": Verdict.FAIL,
    "mesh.norm[deepspeed-zero2-w4.tp2-fp32-heads]": Verdict.PASS,
    # Expected only with the hint that says whose norm it is, the first rank's.
    "training.clip_and_norm[deepspeed-zero0-w2.tp2-bf16-mlp]": Verdict.FAIL,
    "mesh.training[deepspeed-zero3-w4.tp2-fp32-exact]": Verdict.PASS,
    # Muon's momentum has the size of a partition on one rank alone, which waited for the others.
    "training.muon[deepspeed-zero1-w4.tp2-fp32-matrices]": Verdict.FAIL,
}
TP2 = Mesh.parse("tp2")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with start_runner("deepspeed") as started:
        yield started


@pytest.mark.parametrize(("case", "verdict"), CELLS.items(), ids=CELLS)
def test_a_cell_passes_or_fails_as_the_findings_say(runner: Runner, case: str, verdict: Verdict) -> None:
    check_cell(runner, case, verdict)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "mesh.training[deepspeed-zero0-w4.tp2-fp32-sequence]",
            "the word rowwise_split_input_to_sequence",
        ),
        ("training.grads[deepspeed-zero0-w4.tp2-fp32-conv]", "has no plan"),
        ("access.read_grad[deepspeed-zero0-w4.tp2-fp32-similar]", "reading the gradient"),
    ],
)
def test_what_autotp_cannot_do_is_unsupported_before_ranks_start(case: str, words: str) -> None:
    assert words in find_refusal(case)


def test_a_plan_becomes_the_layer_specs_of_autotp() -> None:
    section = tensor_parallel_section(TP2, {"a.b": "colwise_gather_output", "c": "rowwise_split_input"})
    specs = section["tensor_parallel"]["partition_config"]["layer_specs"]
    assert specs == [
        {"patterns": [r"^a\.b\.weight$"], "partition_type": "column", "gather_output": True},
        {"patterns": [r"^c\.weight$"], "partition_type": "skip"},
    ]
    assert tensor_parallel_section(DEFAULT_MESH, {"a": "colwise"}) == {}


@pytest.mark.parametrize(
    ("plan", "words"), [({}, "no tp_plan"), ({"a": "sequence_parallel"}, "unknown word of a tp_plan")]
)
def test_a_plan_that_autotp_cannot_apply_is_refused(plan: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tensor_parallel_section(TP2, plan)


def test_runs_of_consecutive_elements_become_pieces() -> None:
    assert list_runs(3, torch.tensor([0, 1, 4, 5, 9])) == [Piece(3, 0, 2), Piece(3, 4, 6), Piece(3, 9, 10)]
    assert list_runs(3, torch.tensor([], dtype=torch.int64)) == []


class Pair(nn.Module):
    """Two linear layers, of which a plan splits the first by rows and the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.down = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.up(inputs))
        return output


@pytest.mark.world_size(2)
def test_split_weights_are_read_whole_and_owned_by_the_ranks_that_have_their_parts() -> None:
    from zharness.engines import deepspeed

    model = Pair()
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine = deepspeed.factory(model, EngineConfig(mesh=TP2, tp_plan={"up": "colwise", "down": "rowwise"}))
    assert model.up.weight.shape != whole["up.weight"].shape
    assert all(tensor.equal(whole[name]) for name, tensor in engine.full_params().items())
    layout = engine.layout()
    assert layout["up.weight"] == (Piece(0, 0, 4), Piece(1, 4, 6))
    parts = {(piece.rank, piece.start, piece.stop) for piece in layout["down.weight"]}
    assert parts == {(0, 0, 2), (1, 2, 3), (0, 3, 5), (1, 5, 6)}
    assert "down.bias" not in layout
    engine.close()
