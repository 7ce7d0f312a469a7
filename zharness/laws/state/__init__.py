"""The laws of saved state: checkpoints, the full state dict, and files that another program wrote."""

from __future__ import annotations

from zharness.laws.state import consolidate, refuse_pickle, reshard, resume, universal

LAWS = (*resume.LAWS, *reshard.LAWS, *consolidate.LAWS, *universal.LAWS, *refuse_pickle.LAWS)
