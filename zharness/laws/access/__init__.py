"""Collect the laws of the group ``access``: the engine reads and replaces gradients, weights and state by name."""

from __future__ import annotations

from zharness.laws.access import after_change, read_out, shards, step_count, write_in

LAWS = (*read_out.LAWS, *step_count.LAWS, *write_in.LAWS, *shards.LAWS, *after_change.LAWS)
