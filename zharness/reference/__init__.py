"""ZeRO, stages 0 to 3, to be read in one sitting.

Training with Adam keeps four numbers per parameter: the weight, its gradient, and two of the optimizer. Data
parallelism keeps all four on every one of N ranks; ZeRO gives each rank 1/N of the optimizer's (stage 1), of the
gradients too (stage 2), of the weights too (stage 3), and communicates what a rank lacks at the moment it needs it. The
numbers that come out are those of plain PyTorch. Read in this order:

1. ``layout``: a stage is a row of owners; rank r owns a flat range of each parameter's elements.
2. ``parameters``: the optimizer updates this rank's elements in place; then what must be whole is gathered.
3. ``gradients``: from each rank's local gradients to the mean's shard, each exactly once. Parameters travel together
   in ``buckets``; ``rounds`` says when stage 2 reduces which, while backward runs.
4. ``engine``: a training step from those parts. ``initialize`` is the way in: ``sections`` lists the keys of the
   configuration (``schema`` says how they are checked, ``config`` what they come to), ``optimizer`` and ``data`` put
   the client's optimizer, schedule and data set to work on this rank's share.
5. ``precision``: the dtypes of a run. ``loss_scale`` is fp16's, and ``rescaling`` the one place where reduced gradients
   are looked at, unscaled and clipped.
6. ``reading``, ``gathered`` and ``promises``: stage 3. Reading a parameter is an all-gather whose backward is a
   reduce-scatter, and what autograd would keep of it for backward is gathered again instead. ``torch_private`` holds
   what this takes of torch that is not public, ``fallback`` what runs where torch lacks it. ``shelf`` is where a
   bucket's worth of parameters is gathered ahead of its readers, and ``uneven`` holds the collectives themselves, for
   ranks that read the same and for ranks that do not.
7. ``state``, ``saving``, ``pieces`` and ``unpickling``: checkpoints, which any stage at any world size reads;
   ``universal`` reads DeepSpeed's. ``together`` makes one rank's failure everyone's.

``linear`` is the layer that other engines put in the place of torch's at stage 3, and ``deferred`` builds models that
are too large to build first and shard afterwards.

[Note: the tensors of a parameter]
Of a parameter of n elements a rank "has its part" where ``Layout.bounds`` gives it a range; "whole" is all n.

- The Parameter, the model's own object (``parameters``): whole; at stage 3 its data is this rank's part, padded to the
  common length.
- The leaf, which the optimizer updates in place: whole at stage 0, else the part. A view of the Parameter's memory, or,
  where the optimizer works in another dtype, a master of its own, from which ``publish`` casts back.
- The optimizer's state is of the leaf: whole at stage 0, else of the part. The optimizer owns it.
- ``parameter.grad``: autograd's, not reduced yet; whole, but at stage 3 the part, reduced already. Nobody but
  ``gradients`` takes it, and leaves None.
- The reduced gradient, in the leaf's shape and the optimizer's dtype, owned by ``gradients``: from stage 2 on it grows
  during backward, below only at the boundary. ``step`` lends it to the leaf as ``leaf.grad``.
- The gathered copy (stage 3, ``gathered``): whole; its readers and autograd own it, the engine only counts it.
- The stand-in (stage 3): the whole shape without storage, where the gradients of all reads of one forward meet.

[Note: phases]
An engine (``engine.Phase``) is training, inside ``no_sync`` or closed; a call that the phase does not allow raises
UsageError. Around a step it goes through:

1. Forward. Stages 0 to 2 add nothing. At stage 3 a module's ``__call__`` opens a visit, reading an attribute gathers,
   and the end of the visit replaces what autograd saved of the copies by promises.
2. Backward, as often as one likes. Stages 0 and 1: gradients wait in ``parameter.grad``. Stage 2: rounds reduce full
   buckets and what is left at the end of autograd's run. Stage 3: promises gather again, and each stand-in reduces.
3. ``step`` counts a micro-batch. Before the boundary that is all. At the boundary: reduce what waits, unscale and clip;
   where all is finite let the optimizer update the leaves, publish them, and step the schedule; then, updated or
   skipped, forget all gradients and move the loss scale.

Between a boundary and the next backward nothing waits and nothing is gathered: then alone a checkpoint can be saved.

[Note: the epilogue]
Where is the epilogue, the thing that must happen once at the end of a backward? Stages 0, 1 and 3 have none: gradients
are divided where they are reduced, reduced at most once each, and counted at ``step``; so a backward may end, be left
and be entered again (reentrant checkpoints, a backward inside a forward) without anybody noticing. What stage 2 does
at the end of each of autograd's runs, see ``rounds``, goes through ``fallback.EndOfBackward``. For the same reason no
stage has to refuse a direct ``loss.backward()``.
"""

from zharness.reference.engine import Engine
from zharness.reference.initialize import initialize
from zharness.reference.torch_func.linear import Zero3Linear, linear

__all__ = ["Engine", "Zero3Linear", "initialize", "linear"]
