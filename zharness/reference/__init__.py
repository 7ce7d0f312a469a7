"""Implement a ZeRO engine for stages 0 to 3 on ``torch.optim``, short enough to be read in one sitting.

Training with Adam keeps four numbers for each element of a parameter: the weight, its gradient, and two moments in the
optimizer. Data parallelism keeps all four on every one of N ranks. With ZeRO each rank keeps only 1/N of the optimizer
state (stage 1), also of the gradients (stage 2), and also of the weights (stage 3); ranks communicate the other parts
when they need them. The results are those of plain PyTorch. Read in this order:

1. ``layout``: the tensors that each stage shards; rank r owns a flat range of each parameter's elements.
2. ``parameters``: the optimizer updates this rank's elements in place; then replicated parameters are all-gathered.
3. ``gradients``: reduce each rank's local gradients to the mean, exactly once; unscale and clip. Tensors are sent in
   ``buckets``; ``bucket_reducer`` decides when stage 2 reduces each bucket while backward runs.
4. ``engine``: the training step, which uses these parts. ``initialize`` builds the engine.
5. ``unshard``, ``sharded_modules`` and ``saved_tensors``: stage 3. Reading a parameter is an all-gather whose backward
   is a reduce-scatter. ``prefetch`` gathers a bucket ahead of its reads, through ``collectives``.

Stage 3 has the same steps as FSDP2. At each module:

| step | where |
|---|---|
| pre_forward | ``ParamUnsharder.pre_forward``: parameters read from now on belong to this module's forward |
| unshard | ``UnshardedParam.unshard``: all-gather, when the module reads the parameter |
| post_forward, reshard | ``ParamUnsharder.post_forward``: replace what autograd saved, so that nothing keeps it alive |
| pre_backward, unshard | ``UnshardedParam.unpack_hook``: all-gather again, when an autograd node needs the parameter |
| reduce_grad | ``ReduceGradBucket.backward``: reduce-scatter, when the gradients of a bucket are complete |
| post_backward, reshard | ``UnshardedParam.post_backward``: drop the full parameter that this backward unsharded |

The other packages: ``deepspeed_json`` reads the configuration, ``checkpoints`` saves and loads, ``mixed_precision`` has
the dtypes and fp16's loss scale, ``client`` handles the caller's arguments (optimizer, data, models on the meta
device), ``uneven_ranks`` handles ranks that differ, ``torch_func`` has fallbacks for APIs that torch may lack and
ZeRO-3's linear layer, ``inspection`` measures memory and gathers full tensors. ``zharness/torch_private.py`` has what
is private to torch.

[Note: the tensors of a parameter] For a parameter of n elements, a rank's shard is the range that
``ShardLayout.shard_bounds`` returns; a full tensor has all n elements.

- The Parameter, the model's own object (``parameters``): full; at stage 3 its data is the padded shard.
- The leaf, the tensor that the optimizer updates in place: full at stage 0, else the shard. The leaf is a view of the
  Parameter's memory or, if the optimizer has another dtype, a master weight, which ``publish`` casts back.
- The optimizer state has the shape of the leaf and belongs to the optimizer.
- ``parameter.grad``: autograd's gradient, full and not reduced; at stage 3 the shard, already reduced. Only
  ``gradients`` sets the attribute to None.
- The reduced gradient, in the leaf's shape and the optimizer's dtype, belongs to ``gradients``: stages 2 and 3
  accumulate it during backward, stages 0 and 1 compute it at the accumulation boundary. ``step`` assigns it to
  ``leaf.grad`` while the optimizer runs.
- The unsharded tensor (stage 3, ``unshard``): full; modules and autograd own this tensor, the engine counts its bytes.
- The gradient placeholder (stage 3): a tensor of the full shape without storage, in which autograd adds up the
  gradients of all reads of one forward.

[Note: phases] An engine (``engine.EnginePhase``) is training, inside ``no_sync``, or closed; a method that the phase
does not allow raises UsageError. A step has three parts:

1. Forward. Stages 0 to 2 add nothing. Stage 3 unshards what a module reads, and reshards it after the forward.
2. Backward, any number of times. Stages 0 and 1: gradients stay in ``parameter.grad``. Stage 2: a full bucket is
   reduced at once, every other bucket at the end of the backward. Stage 3: unpack hooks unshard parameters again, and
   placeholders reduce gradients.
3. ``step`` counts a micro-batch. At the accumulation boundary it reduces the remaining gradients, unscales and clips.
   If all gradients are finite, the optimizer updates the leaves, ``publish`` copies them to the parameters, and the
   schedule steps. In any case ``step`` drops all gradients and updates the loss scale.

Between a boundary and the next backward there are no gradients and no unsharded tensors; only then can one save.

[Note: the epilogue] DeepSpeed runs an epilogue once at the end of a backward. Stages 0, 1 and 3 have none here: each
gradient is reduced at most once, and divided by that reduction; micro-batches are counted in ``step``. So nested
backwards (of reentrant checkpoints, or inside a forward) need no special case. At stage 2,
``torch_fallback.EndOfBackward`` calls ``bucket_reducer`` at the end of each graph task. No stage has to refuse a direct
``loss.backward()``, because nothing depends on a call of ``engine.backward``.
"""

from zharness.reference.engine import Engine
from zharness.reference.initialize import initialize
from zharness.reference.torch_func.linear import Zero3Linear, linear

__all__ = ["Engine", "Zero3Linear", "initialize", "linear"]
