"""Inspect an engine: count the bytes of its tensors on a rank, and copy full tensors to the CPU for the user."""
