"""Define the dtypes of a training run, and the loss scale of fp16."""
