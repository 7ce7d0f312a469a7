"""Beside training: the bytes that ranks hold, and full tensors copied to the CPU for callers."""
