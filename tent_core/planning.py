"""Which candidates carry which rows of a batch: selection once per class of requests, not per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tent_core.batch import Options, Rows
from tent_core.columns import distinct, subset
from tent_core.errors import UsageError
from tent_core.mistakes import nearest
from tent_core.policy import (
    PolicyEntry,
    Query,
    Selection,
    TransportFacts,
    find_route,
    select,
    size_edges,
)
from tent_core.reshape import Merge
from tent_core.types import Capabilities, MemoryKind, Reach, memory_kind
from tent_core.work import Requests

Trait = tuple[str, tuple[tuple[str, int], ...]]
"""What selection reads of a buffer: its location, and (name, number) of the transports that offer it."""


class Group(NamedTuple):
    """Rows of a batch that share one selection: `rows` are positions in the batch (None: all).

    Where neighbours were joined, `merge` says what each of the `requests` stands for among these rows.
    `direct`: only the health of its first candidate decides whether that gets them as they are, at once.
    """

    requests: Requests
    rows: Rows
    selection: Selection
    merge: Merge | None = None
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Selections by size: `selections[i]` is for lengths in [edges[i], edges[i + 1])."""

    edges: NDArray[np.uint64]
    selections: tuple[Selection, ...]


@dataclass(frozen=True)
class Planner:
    """The policy and the facts about transports of one engine; immutable."""

    entries: tuple[PolicyEntry, ...]
    facts: Mapping[str, TransportFacts]

    def plan(
        self,
        local: Trait,
        remote: Trait,
        options: Options,
        *,
        same_machine: bool,
        same_process: bool,
        unreachable: Mapping[str, str],
    ) -> Plan:
        """Evaluate the policy for every size class of requests between two kinds of buffers.

        Raises UsageError when the options name an entry that the policy does not have.
        """
        self._check_entry(options.policy)
        kind = memory_kind(remote[0])
        gone = {**self._out_of_reach(same_machine, same_process), **unreachable}
        selections: list[Selection] = []
        starts: list[int] = []
        for edge in (1, *(e for e in size_edges(self.entries, self.facts) if e > 1)):
            query = Query(
                segment_type="file" if kind is MemoryKind.FILE else "memory",
                same_machine=same_machine,
                local_memory=local[0],
                remote_memory=remote[0],
                size=edge,
                priority=options.priority,
                intent=options.intent,
                policy_name=options.policy,
            )
            found = select(
                self.entries,
                query,
                self.facts,
                dict(local[1]),
                dict(remote[1]),
                gone,
                options.transport,
            )
            if not found.candidates and found.entry is not None:
                found = self._through_host(found, found.entry, query, local, remote, gone)
            if not selections or found != selections[-1]:
                selections.append(found)
                starts.append(edge)
        return Plan(np.array(starts, np.uint64), tuple(selections))

    def able(self, name: str) -> Capabilities:
        """What a transport can do in this engine; nothing, if it does not run."""
        return self.facts[name].capabilities or Capabilities()

    def _through_host(
        self,
        found: Selection,
        entry: PolicyEntry,
        query: Query,
        local: Trait,
        remote: Trait,
        gone: Mapping[str, str],
    ) -> Selection:
        """The same selection, with the route through host memory if there is one."""
        offers = dict(local[1]), dict(remote[1])
        route = find_route(self.entries, entry, query, self.facts, *offers, gone)
        return found if route is None else replace(found, route=route)

    def _check_entry(self, wanted: str | None) -> None:
        names = [entry.name for entry in self.entries]
        if wanted is not None and wanted not in names:
            close = nearest(wanted, names)
            raise UsageError(
                f"no policy entry is named {wanted!r}: the policy has {', '.join(map(repr, names))}"
                + (f"; did you mean {close!r}?" if close else "")
            )

    def _out_of_reach(self, same_machine: bool, same_process: bool) -> dict[str, str]:
        out = {}
        for name, fact in self.facts.items():
            if fact.capabilities is None:
                continue
            reach = fact.capabilities.reach
            if reach <= Reach.PROCESS and not same_process:
                out[name] = "reaches only engines of the same process"
            elif reach <= Reach.HOST and not same_machine:
                out[name] = (
                    "reaches only processes of the same machine, and the peer runs on another"
                )
        return out


def by_trait(
    requests: Requests, local: Mapping[int, Trait], remote: Mapping[int, Trait]
) -> list[tuple[Requests, Rows, Trait, Trait]]:
    """Split requests by the traits of their buffers; almost always there is one part, which is not copied."""
    if len(requests.local_used) == len(requests.remote_used) == 1:
        return [(requests, None, local[requests.local_used[0]], remote[requests.remote_used[0]])]
    here = sorted({local[i] for i in requests.local_used})
    there = sorted({remote[i] for i in requests.remote_used})
    if len(here) == 1 and len(there) == 1:
        return [(requests, None, here[0], there[0])]
    codes = _codes(requests.local_ids, local, here) * len(there) + _codes(
        requests.remote_ids, remote, there
    )
    parts: list[tuple[Requests, Rows, Trait, Trait]] = []
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        h, t = divmod(int(code), len(there))
        parts.append((subset(requests, rows), rows, here[h], there[t]))
    return parts


def _codes(
    ids: NDArray[np.int32], traits: Mapping[int, Trait], order: Sequence[Trait]
) -> NDArray[np.intp]:
    used = distinct(ids)
    table = np.zeros(max(used) + 1, np.intp)
    for i in used:
        table[i] = order.index(traits[i])
    codes: NDArray[np.intp] = table[ids]
    return codes


def by_size(requests: Requests, rows: Rows, plan: Plan) -> list[Group]:
    """Split requests by the size classes of their plan; one class is not copied."""
    if len(plan.selections) == 1:
        return [Group(requests, rows, plan.selections[0])]
    classes = np.searchsorted(plan.edges, requests.local[:, 1], side="right") - 1
    first = int(classes[0])
    if (classes == first).all():
        return [Group(requests, rows, plan.selections[first])]
    groups = []
    for c in np.unique(classes):
        chosen = np.flatnonzero(classes == c)
        where = chosen if rows is None else rows[chosen]
        groups.append(Group(subset(requests, chosen), where, plan.selections[int(c)]))
    return groups


def trait_of(location: str, offers: Any) -> Trait:
    """The trait of a buffer at `location` that `offers` (name to number) make available."""
    return location, tuple(sorted(offers.items()))
