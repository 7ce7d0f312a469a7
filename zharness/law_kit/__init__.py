"""What laws are built from: the contexts of ranks and judges, scenarios, programs, plain training."""
