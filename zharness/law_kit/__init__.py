"""The building blocks of laws: contexts of ranks and judges, scenarios, random programs, and judges of optimizer steps."""
