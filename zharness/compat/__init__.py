"""Provide drop-in replacements for the test classes of other projects, which run tests on this package's ranks."""
