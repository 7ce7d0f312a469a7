"""ZeRO-3's linear layer as an autograd Function for torch.func, and fallbacks for torch releases that lack an API."""
