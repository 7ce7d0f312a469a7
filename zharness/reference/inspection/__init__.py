"""Inspect an engine: count the bytes of tensors on a rank, and copy full tensors to the CPU for callers."""
