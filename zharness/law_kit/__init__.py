"""The building blocks of laws: contexts of ranks and judges, scenarios, programs, and judges of optimizer steps."""
