"""An autograd Function for torch.func, ZeRO-3's linear layer, and fallbacks for torch releases that lack an API."""
