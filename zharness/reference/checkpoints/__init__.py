"""Save and load the checkpoints of the reference engine, and load DeepSpeed's universal checkpoints."""
