"""Collect the laws of the group ``access``: an engine's own functions read and replace the tensor that was named."""

from __future__ import annotations

from zharness.laws.access import read_out, shards, write_in

LAWS = (*read_out.LAWS, *write_in.LAWS, *shards.LAWS)
