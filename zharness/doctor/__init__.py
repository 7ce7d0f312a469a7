"""``zharness doctor``: inspect whether this machine can run the harness, and print a remedy for each problem."""
