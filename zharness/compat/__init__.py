"""Drop-in replacements for the test classes of other projects, which run their tests on this package's ranks."""
