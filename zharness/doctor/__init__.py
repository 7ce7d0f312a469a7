"""Implement ``zharness doctor``: inspect whether this machine can run zharness, and print a remedy for each problem."""
