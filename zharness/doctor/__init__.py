"""``zharness doctor``: inspect whether this machine and environment can run the harness, with a remedy per problem."""
