"""Provide drop-in replacements for the test classes of other projects. They run the tests on this package's ranks."""
