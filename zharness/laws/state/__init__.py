"""Collect the laws of the group ``state``: checkpoints restore training, and damaged files are refused."""

from __future__ import annotations

from zharness.laws.state import (
    buffer_kinds,
    consolidate,
    one_folder,
    other_world_size,
    refuse_damaged,
    refuse_missing,
    refuse_pickle,
    reshard,
    resume,
    several_saves,
    universal,
)

LAWS = (
    *resume.LAWS,
    *several_saves.LAWS,
    *one_folder.LAWS,
    *reshard.LAWS,
    *other_world_size.LAWS,
    *consolidate.LAWS,
    *buffer_kinds.LAWS,
    *universal.LAWS,
    *refuse_pickle.LAWS,
    *refuse_missing.LAWS,
    *refuse_damaged.LAWS,
)
