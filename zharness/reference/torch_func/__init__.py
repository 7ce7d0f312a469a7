"""Beside the engine: autograd Functions for torch.func, and the fallbacks for torch releases that lack an API."""
