"""Handle ranks that use different parameters, raise an error alone, or have different inputs.

The other modules in ``zharness/reference/`` assume that all ranks run the same collectives in the same order.
``negotiation`` runs collectives for ranks that use different parameters, inside ``engine.uneven()``.
``collective_order`` detects such ranks outside that block. ``rank_errors`` raises one rank's error on all ranks, so
that no rank hangs.
"""
