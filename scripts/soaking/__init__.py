"""The long runs of ``soak.py``: cells on correct engines, and groups of ranks."""
