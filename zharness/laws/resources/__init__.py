"""The laws of resources: bytes stored, sent and gathered, nothing left behind, and how much Python work a step does."""

from __future__ import annotations

from zharness.laws.resources import byte_counts, hook_count, leaks, poisoned_memory

LAWS = (*byte_counts.LAWS, *leaks.LAWS, *poisoned_memory.LAWS, *hook_count.LAWS)
