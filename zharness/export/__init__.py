"""A cell as a script that stands on its own, and the smallest cell that still fails in the same way."""
