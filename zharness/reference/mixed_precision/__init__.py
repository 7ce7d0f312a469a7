"""Mixed precision: the dtypes of a run, and the loss scale of fp16."""
