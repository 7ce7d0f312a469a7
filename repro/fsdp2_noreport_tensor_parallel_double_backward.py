"""A double backward through layers that tensor parallelism splits silently loses the gradient of a gradient penalty.

id: tensor-parallel-double-backward
engine: fsdp2
symptom: with parallelize_module, the double backward of a penalty (create_graph=True) silently adds no gradient
reported: no report known
affects: ==2.13.0
fixed: not yet
ranks: 2
law: double_backward.gradient_penalty
signature: of the penalty's gradient are wrong
ok: repro: the gradient penalty under tensor parallelism OK.

Run it with nothing but torch installed:

    torchrun --standalone --nproc_per_node=2 repro/fsdp2_noreport_tensor_parallel_double_backward.py

The loss is the sum of squares of the gradient with respect to the input, as in a gradient penalty, plus the sum of the
outputs. The gradient of the loss with respect to the input should equal that of plain PyTorch; it needs no collective
of FSDP2. With a column-wise and a row-wise layer the first gradient is right, but the penalty's part of the second
gradient is lost.

If the bug is absent, the script prints the line "ok" above and exits with 0. If the bug is present, it prints a line
that starts with "repro: REPRODUCED" and exits with 1. Any other end, such as a traceback without that line, shows
neither that the bug is present nor that the bug is absent.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

OK = "repro: the gradient penalty under tensor parallelism OK."


def build() -> nn.Module:
    """Return two linear layers with weights in {-1, 0, 1}, so that every sum is exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-1, 2, param.shape))
    return model


def penalize(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient with respect to the inputs, and the penalty's gradient with respect to the inputs."""
    leaf = inputs.clone().requires_grad_()
    output = model(leaf)
    (input_grad,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
    (input_grad.square().sum() + output.sum()).backward()
    assert leaf.grad is not None
    return input_grad.detach(), leaf.grad


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    inputs = torch.randint(-1, 2, (4, 8)).float()
    expected_grad, expected = penalize(build(), inputs)
    mesh = init_device_mesh("cpu", (2,))
    split = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    grad, actual = penalize(split, inputs)
    if not torch.equal(grad, expected_grad):
        raise AssertionError("the first gradient differs from plain PyTorch's")
    wrong = int((actual != expected).sum())
    if wrong:
        place = int((actual != expected).flatten().nonzero()[0])
        got, wanted = (each.flatten()[place].item() for each in (actual, expected))
        count = f"{wrong} of {expected.numel()} elements of the penalty's gradient are wrong"
        print(f"repro: REPRODUCED: {count}, the first is {got:g} for {wanted:g}\n", end="", flush=True)
        return 1
    if rank == 0:
        print(OK, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:
        dist.destroy_process_group()
    sys.exit(status)
