"""Prepare the arguments of ``initialize``: optimizer, schedule, data set, and models on the meta device."""
