"""Run DeepSpeed's test files in three ways, and render what happened as tables (``scripts/deepspeed_tests.py``)."""
