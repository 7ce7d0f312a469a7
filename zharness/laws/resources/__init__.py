"""Collect the laws of the group ``resources``, which count bytes, leaked objects and Python calls of an engine."""

from __future__ import annotations

from zharness.laws.resources import byte_counts, hook_count, leaks, poisoned_memory

LAWS = (*byte_counts.LAWS, *leaks.LAWS, *poisoned_memory.LAWS, *hook_count.LAWS)
