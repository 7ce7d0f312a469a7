"""Does a sharded training engine compute what plain PyTorch computes?

[Note: floors]
A file imports files of a lower floor, or of its own package (``suites/meta/test_house.py``)::

    0  errors, environment, mesh, names, toml_text, comm, step_summary, torch_private
    0  distributed_tensor, raising_frame
    1  device
    2  cell, world, workload, reference, law_set, project_file
    3  engines
    4  pytest_ranks, parity
    5  law_kit
    6  laws, mutants
    7  run
    8  report, releases, kill_matrix, doctor, export
    9  hunt, site, tour
    10 plugin, cli, conformance, verification, compat
    11 __main__

[Note: a cell from command to verdict]
``zharness check 'training.grads[reference-zero3-w2-fp32-mlp]'`` passes these files, in this order.
``suites/meta/test_map.py`` compares them with a traced run.

1. The command. ``cli/__init__.py``, ``cli/check.py`` and ``cli/options.py`` (``environment.py``) parse it, with the
   options that ``cli/project_options.py`` finds by ``project_file.py``.
   ``names.py`` and ``cli/name_index.py`` refuse unknown names before torch is imported; ``releases/overlay.py`` names
   their cache folder. ``world/launch.py`` detects torchrun. ``run/expected_failures.py``,
   ``run/shipped_failures.py`` and ``run/user_failures.py`` read the expected failures from TOML (``toml_text.py``), and
   ``run/matching_failures.py`` matches them with cells.
   ``report/outputs.py`` has the output files.
2. The plan. ``run/check_loop.py`` is the loop over cells (``run/cell_queue.py``,
   ``run/progress.py``). ``run/plan.py`` makes the cells of ``cell.py``, which
   ``run/cell_planner.py`` accepts or refuses, with the axes
   of ``mesh.py`` (``run/mesh_claims.py``), from the laws (``laws/registry.py``, ``law_kit/law.py``), the engines
   (``engines/registry.py``, ``engines/engine_info.py``) and the models (``workload/model_lookup.py``,
   ``workload/user_model.py``).
   ``run/claims.py`` asks each engine for its capabilities (``engines/capabilities.py``, ``engines/option_keys.py``,
   ``engines/reference.py``), ``run/configuration.py`` reads a DeepSpeed JSON, ``law_kit/setting.py`` parses the setting
   of a cell, ``run/unmatched_failures.py`` finds expected failures that match no cell, and
   ``run/missing_claims.py`` says which claims would add cells. A pattern is expanded without the law variants that a
   pinned law set leaves out (the modules ``law_set`` and ``run.law_variants``). A run without a pattern adds cells that
   cover pairs (``run.covering``, ``run.covering_axes``), reports the pairs that no cell can have
   (``run.claimed_pairs``), and finds expected failures for options under which no cell failed (``run.stale_failures``).
   ``--changed`` keeps only the cells that reach a function that differs from a commit (``run.changed_cells``,
   ``run.candidate_cells``, ``run.changed_functions``, ``run.reach``, ``run.engine_sources``).
3. The ranks. ``releases/rank_environment.py`` combines the release, which ``releases/prepared_release.py`` finds or
   installs, with the imports that ``engines/warm_up.py`` names; a rank server starts with both. ``run/runner.py`` runs
   one cell at a time, on ranks of the pool that ``run/rank_pool.py`` names: ``world/server.py`` and ``world/pools.py``
   fork a team (``world/team.py``) of ranks (``world/rank.py``, ``world/process_group.py``) on the CPU or on GPUs
   (``device/__init__.py``, ``device/gpu_memory.py``) within the machine's limits (``world/limits.py``,
   ``world/orphans.py``, ``world/cores.py``).
4. Observe, on every rank. ``run/observe_and_judge.py`` sets how a GPU multiplies (``device/float32_products.py``,
   ``law_kit/dtypes.py``) and names operators without a deterministic algorithm (``device/determinism.py``). It builds
   the ``law_kit/rank_context.py`` of the law, here
   ``laws/training/grads.py``, and the engine (``engines/options.py``, ``engines/optimizers.py``,
   ``law_kit/construction.py``, ``law_kit/backward_calls.py``) around a model (``workload/models.py``,
   ``workload/generators.py``, ``workload/nested_tensors.py``, ``workload/nets.py``,
   ``workload/synchronized_norm.py``). ``comm.py`` has the collectives of ranks, and ``torch_private.py`` wraps private
   parts of torch. ``parity/snapshot.py`` writes the evidence, and ``parity/contamination.py`` finds what the engine
   changed in the process.
5. The reference engine, in step 4. ``reference/initialize.py`` reads the JSON
   (``reference/deepspeed_json/settings.py``,
   ``reference/deepspeed_json/schema.py``, ``reference/deepspeed_json/sections.py``,
   ``reference/mixed_precision/precision.py``, ``reference/mixed_precision/loss_scale.py``), checks that ranks agree
   (``reference/uneven_ranks/rank_errors.py``, ``reference/uneven_ranks/rank_facts.py``) and shards the model
   (``reference/client/meta_init.py``, ``reference/copies/replicas.py``, ``reference/parameters.py``,
   ``reference/layout.py``, ``reference/buckets.py``,
   ``reference/client/optimizer.py``, ``reference/checkpoints/training_state.py``). ``reference/engine.py`` trains:
   ``reference/sharded_modules.py`` unshards before a module's forward (``reference/unshard.py``,
   ``reference/prefetch.py``, ``reference/saved_tensors.py``, ``reference/torch_func/torch_fallback.py``), and
   ``reference/gradients.py`` reduces, by the collectives of ``reference/collectives.py``
   (``reference/uneven_ranks/negotiated_agreement.py``, ``reference/uneven_ranks/negotiation.py``,
   ``reference/uneven_ranks/collective_order.py``).
   ``reference/inspection/memory.py``, ``reference/inspection/coalesced_collectives.py``,
   ``reference/inspection/recorded_reads.py`` and ``reference/inspection/tensor_access.py`` serve observers.
6. The watch, beside steps 4 and 5. ``world/task_watcher.py`` collects reports and output (``world/streams.py``,
   ``world/current_rank.py``, ``world/progress.py``, ``world/rank_coordinator.py``) until each rank has an outcome
   (``world/outcome.py``, ``world/leftovers.py``, ``device/cuda_errors.py``), its deadline passes
   (``world/deadline.py``, ``world/postmortem.py``) or the rank waits forever for a rank that has left its part of the
   task (``world/part_departures.py``).
7. Judge, in a process that never imported the engine. ``law_kit/judge_context.py`` gives the law the evidence and the
   ``parity/baseline.py`` (``parity/baseline_cache.py``); ``law_kit/reduced_grads.py`` pairs the gradients of all ranks
   with plain PyTorch's, and ``parity/compare.py`` compares them within
   ``parity/bounds.py`` (``parity/grad_parts.py``) or exactly (``parity/certificate.py``);
   ``parity/attribution.py`` explains a mismatch.
8. The verdict. ``run/verdicts.py`` derives it, ``run/locate.py`` searches the first module that departs, and
   ``run/record.py`` defines the JSON line, which ``run/record_reader.py`` reads. ``run/outcomes.py`` determines the
   exit code. ``report/matrix.py``, ``report/engine_names.py``,
   ``report/sensitivity.py``, ``report/failures.py`` and ``report/failure_groups.py`` render the report, and
   ``step_summary.py`` writes it to the summary of a GitHub workflow.

[Note: a test from marker to verdict]
``plugin.py`` makes one item for each world size of a ``world_size`` marker. After collection,
``pytest_ranks/controller.py`` starts a rank server (``world/server.py``), which has collected every test and run none.
For each item the server forks a team of ranks, or passes the item to a pool (``world/pools.py``, ``world/team.py``).
``world/rank.py`` is the main function of a rank; in it ``pytest_ranks/rank_protocol.py`` runs pytest's protocol for the
item and sends the report of each phase. ``world/task_watcher.py`` collects reports and output until each rank has an
outcome; ``pytest_ranks/merge_reports.py`` merges them into one verdict, which the controller logs.

[Note: decisions]
- The engine runs first and the baseline second, in the judge's process. Teacher forcing needs the engine's weights, and
  an engine may have replaced functions of torch in its own process.
- The replay of an optimizer is a running error analysis, not a closed formula: every operation carries its own rounding
  error, so one class covers every elementwise optimizer.
- Stage 3 of the reference engine neither frees nor refills storages. If autograd saves a tensor of an unsharded
  parameter, a hook replaces it and unshards again in backward (``reference/unshard.py``,
  ``reference/saved_tensors.py``). The
  gradients of all uses in one forward are summed before they are reduced, so a tied weight rounds as in plain PyTorch.
- The output of a rank goes through pipes to its server, with markers between phases. pytest's own capture files are
  shared with forks, and a dying rank would take them down.
- Before a rank server forks ranks, it imports the torch modules that earlier ranks had to import themselves.
- The collective in which a hung rank waits is read from its stack, which costs nothing before the hang.
- Reproductions are found, run and judged in ``releases/``, because they need its overlays.
- The seed of a cell does not depend on engine, stage and law, so that cells that differ only in these have the same
  weights and data.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zharness.conformance import check_engine, run_laws
    from zharness.reference.initialize import initialize
    from zharness.verification import verify

__version__ = "0.1.0"

__all__ = ["__version__", "check_engine", "initialize", "run_laws", "verify"]

_MODULE_OF = {
    "check_engine": "zharness.conformance",
    "initialize": "zharness.reference",
    "run_laws": "zharness.conformance",
    "verify": "zharness.verification",
}


def __getattr__(name: str) -> Any:
    """Import a name of the public API on first use, because the import loads torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
