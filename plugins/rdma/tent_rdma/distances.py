"""How much longer a rail takes for memory that is not next to its NICs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tent_core.topology import Topology
from tent_rdma.devices import ChosenDevice, ranks
from tent_rdma.settings import Settings

KEPT = 1000
"""Pairs of locations that are remembered."""


class Pairing(Protocol):
    """A rail: the index of its NIC here, and the NUMA node of the peer's (-1: unknown)."""

    @property
    def here(self) -> int: ...
    @property
    def node(self) -> int: ...


class Distances:
    """Factors by rail, for memory at two locations; each is reckoned once. May be used from any thread."""

    def __init__(
        self,
        rails: Sequence[Pairing],
        nics: Sequence[ChosenDevice],
        topology: Topology,
        settings: Settings,
    ) -> None:
        self._rails = rails
        self._nics = nics
        self._topology = topology
        self._settings = settings
        self._known: dict[tuple[str, str], tuple[float, ...]] = {}

    def between(self, places: tuple[str, str]) -> tuple[float, ...] | None:
        """A factor for each rail for memory here and at the peer, or None where all are alike."""
        known = self._known.get(places)
        if known is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            known = self._known[places] = self._reckon(*places)
        return known or None

    def _reckon(self, here: str, there: str) -> tuple[float, ...]:
        tiers = ranks(here, self._nics, self._topology, self._settings)
        tier = {index: t for t, members in enumerate(tiers) for index in members}
        node = there.partition(":")[2] if there.startswith("cpu:") else ""
        factors = []
        for rail in self._rails:
            away = tier.get(rail.here, len(tiers))
            away += bool(node) and rail.node >= 0 and str(rail.node) != node
            factors.append(self._settings.numa_penalty**away)
        return () if len(set(factors)) == 1 else tuple(factors)
