"""Whether this machine and this environment can run the harness, each point with what to do."""
