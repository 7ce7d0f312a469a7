"""Invent the records of runs of two engines on several releases, with what the site has to show of them."""

from __future__ import annotations

from zharness.cell import Cell
from zharness.run import Record, Verdict

TORCH = "2.13.0+cpu"
MARKUP = "<img src=x onerror=document.title='broken'> </script>"
RETAINED = "double_backward.retained_same_loss"
ISSUE = "pytorch/pytorch#47260"
REUSED = "Expected to mark a variable ready only once"  # a signature of the entry for RETAINED in ddp.toml


def make(engine: str, version: str, law: str, verdict: Verdict, cause: str = "", upstream: str = "") -> Record:
    """Invent the record of one cell."""
    torch_version = version if engine == "ddp" else TORCH
    cell = Cell(law, engine, 0, 2, "fp32", "mlp")
    return Record(cell, 0, verdict, version, torch_version, cause=cause, expected_failure=upstream)


def many_runs() -> list[Record]:
    """Return records in which training.grads of deepspeed broke in 0.18.8 and was mended in 0.19.8.

    The releases of deepspeed come in the wrong order, and 0.9.5 is older than 0.18.8. DDP breaks RETAINED with a reason
    that its expected failures know.
    """
    return [
        make("reference", "0.1.0", "training.grads", Verdict.PASS),
        make("reference", "0.1.0", RETAINED, Verdict.PASS),
        make("deepspeed", "0.19.8", "training.grads", Verdict.PASS),
        make("deepspeed==0.18.8", "0.18.8", "training.grads", Verdict.FAIL, f"a wrong number {MARKUP}"),
        make("deepspeed==0.9.5", "0.9.5", "training.grads", Verdict.PASS),
        make("deepspeed", "0.19.8", "torch_func.grad", Verdict.CRASH, "it crashed", "no report known"),
        make("ddp", TORCH, "training.grads", Verdict.PASS),
        make("ddp", TORCH, RETAINED, Verdict.CRASH, REUSED, ISSUE),
        make("ddp", TORCH, "torch_func.grad", Verdict.UNSUPPORTED, "not claimed"),
    ]
