"""Copies of sharded weights: shard within groups of ranks, and replicate across them."""
