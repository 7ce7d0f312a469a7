"""Run test files of DeepSpeed and PyTorch both ways, and render tables of the runs (``scripts/side_by_side.py``)."""
