"""Handle ranks that use different parameters, raise an error alone, or initialize with different arguments.

The other modules in ``zharness/reference/`` assume that all ranks run the same collectives in the same order. They
handle different ranks only through the protocol ``collectives.RankAgreement``, which ``negotiated_agreement``
implements: ``negotiation`` runs collectives for ranks that use different parameters, inside ``engine.uneven()``, and
``collective_order`` detects such ranks outside that block. ``rank_errors`` and ``rank_facts`` compare the arguments
that ``initialize`` got on each rank. Only ``initialize`` imports this package.
"""
