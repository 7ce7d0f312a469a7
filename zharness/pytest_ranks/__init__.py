"""Test items that run inside ranks."""
