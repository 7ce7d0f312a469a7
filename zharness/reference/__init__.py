"""ZeRO, stages 0 to 3, to be read in one sitting.

Training with Adam keeps four numbers per parameter: the weight, its gradient, and two of the optimizer. Data
parallelism keeps all four on every one of N ranks; ZeRO gives each rank 1/N of the optimizer's (stage 1), of the
gradients too (stage 2), of the weights too (stage 3), and communicates what a rank lacks at the moment it needs it. The
numbers that come out are those of plain PyTorch. Read in this order:

1. ``layout``: a stage is a row of owners; rank r owns a flat range of each parameter's elements.
2. ``parameters``: the optimizer updates this rank's elements in place; then what must be whole is gathered.
3. ``gradients``: from each rank's local gradients to the mean's shard, each exactly once.
4. ``engine``: a training step from those parts. ``config``, ``optimizer`` and ``initialize`` are the way in.
5. ``reading``, ``gathered`` and ``promises``: stage 3. Reading a parameter is an all-gather whose backward is a
   reduce-scatter, and what autograd would keep of it for backward is gathered again instead. ``torch_private`` holds
   what this takes of torch that is not public.
"""

from zharness.reference.engine import Engine
from zharness.reference.initialize import initialize

__all__ = ["Engine", "initialize"]
