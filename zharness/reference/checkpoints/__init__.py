"""Checkpoints of the reference engine: its own format, and the universal checkpoints of DeepSpeed."""
