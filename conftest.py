"""The suites' own settings; the fixtures come with the plugin that the package registers."""

import torch

# Ranks are forked from this process: a child of one that has used torch's thread pool hangs in its first parallel loop.
torch.set_num_threads(1)
