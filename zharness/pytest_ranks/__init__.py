"""Run pytest tests on ranks: send them to the ranks, run pytest's protocol there, and merge the ranks' reports."""
