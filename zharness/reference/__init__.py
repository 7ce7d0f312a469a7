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
7. ``state``, ``saving`` and ``unpickling``: checkpoints, which any stage at any world size reads; ``universal`` reads
   DeepSpeed's. ``together`` makes one rank's failure everyone's.

``linear`` is the layer that other engines put in the place of torch's at stage 3, and ``deferred`` builds models that
are too large to build first and shard afterwards.

Where is the epilogue, the thing that must happen once at the end of a backward? Stages 0, 1 and 3 have none: gradients
are divided where they are reduced, reduced at most once each, and counted at ``step``; so a backward may end, be left
and be entered again (reentrant checkpoints, a backward inside a forward) without anybody noticing. What stage 2 does
at the end of each of autograd's runs, see ``rounds``, goes through ``fallback.EndOfBackward``. For the same reason no
stage has to refuse a direct ``loss.backward()``.
"""

from zharness.reference.engine import Engine
from zharness.reference.initialize import initialize
from zharness.reference.linear import Zero3Linear, linear

__all__ = ["Engine", "Zero3Linear", "initialize", "linear"]
