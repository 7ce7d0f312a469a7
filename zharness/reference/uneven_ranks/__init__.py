"""Ranks that differ: branches on data that use other parameters, errors on one rank, and inputs that do not match.

The ordinary path in ``zharness/reference/`` assumes that all ranks run the same collectives in the same order.
``negotiation`` runs collectives for ranks that use different parameters, inside ``engine.uneven()``.
``collective_order`` detects such ranks outside that block. ``rank_errors`` raises one rank's error on all ranks, so
that none hangs.
"""
