"""What ``soak.py`` runs for a long time: cells on engines that are right, and groups of ranks."""
