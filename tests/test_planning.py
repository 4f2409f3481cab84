"""Groups: every row of a batch is in exactly one, with the selection that its own buffers and size give."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tent_core.batch import Options
from tent_core.columns import distinct
from tent_core.planning import Planner, by_size, by_trait, trait_of
from tent_core.policy import PolicyEntry, TransportFacts
from tent_core.types import DRAM_TO_DRAM, Capabilities, Opcode, Reach
from tent_core.work import Requests

NUMBERS = {"near": 1001, "far": 1002, "inner": 1003}
FACTS = {
    "near": TransportFacts("near", 1001, True, "", Capabilities(DRAM_TO_DRAM, Reach.HOST)),
    "far": TransportFacts("far", 1002, True, "", Capabilities(DRAM_TO_DRAM, Reach.NETWORK)),
    "inner": TransportFacts("inner", 1003, True, "", Capabilities(DRAM_TO_DRAM, Reach.PROCESS)),
}
PLANNER = Planner(
    (
        PolicyEntry("small", ("far", "near"), max_size=(64 << 10) - 1),
        PolicyEntry("large", ("inner", "near", "far")),
    ),
    FACTS,
)
HERE = trait_of("cpu:0", NUMBERS)


def requests_of(lengths: list[int], local_ids: list[int], remote_ids: list[int]) -> Requests:
    n = len(lengths)
    local = np.array([[4096 * (i + 1), lengths[i]] for i in range(n)], np.uint64)
    here, there = np.array(local_ids, np.int32), np.array(remote_ids, np.int32)
    return Requests(
        Opcode.WRITE,
        local,
        local.copy(),
        here,
        there,
        distinct(here),
        distinct(there),
        dict.fromkeys(remote_ids, 1),
        sum(lengths),
    )


def plan(
    there: tuple[str, tuple[tuple[str, int], ...]] = HERE,
    *,
    machine: bool = True,
    process: bool = False,
):
    return PLANNER.plan(
        HERE, there, Options(), same_machine=machine, same_process=process, unreachable={}
    )


def test_a_plan_has_one_selection_for_each_range_of_sizes_that_differ() -> None:
    made = plan()
    assert made.edges.tolist() == [1, 64 << 10]
    assert [s.candidates for s in made.selections] == [("far", "near"), ("near", "far")]


def test_a_transport_is_out_of_reach_beyond_its_process_or_its_machine() -> None:
    assert plan(process=True).selections[-1].candidates == ("inner", "near", "far")
    far = plan(machine=False).selections[-1]
    assert far.candidates == ("far",)
    assert {p.name for p in far.passed_over} == {"inner", "near"}


def test_requests_of_one_kind_are_not_copied() -> None:
    requests = requests_of([4096, 8192], [0, 0], [3, 3])
    ((part, rows, _, _),) = by_trait(requests, {0: HERE}, {3: HERE})
    assert part is requests
    assert rows is None
    (group,) = by_size(part, rows, plan())
    assert group.requests is requests
    assert group.rows is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 4096, (64 << 10) - 1, 64 << 10, 1 << 20]),
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_every_row_is_in_one_group_with_its_own_selection(rows: list[tuple[int, int, int]]) -> None:
    lengths, local_ids, remote_ids = (list(c) for c in zip(*rows, strict=True))
    only_far = trait_of("cpu:1", {"far": 1002})
    local = {0: HERE, 1: only_far, 2: HERE}
    remote = {0: HERE, 1: HERE, 2: only_far, 3: trait_of("cpu:0", {})}
    requests = requests_of(lengths, local_ids, remote_ids)
    seen: dict[int, tuple[str, ...]] = {}
    for part, where, here, there in by_trait(requests, local, remote):
        made = PLANNER.plan(
            here, there, Options(), same_machine=True, same_process=False, unreachable={}
        )
        for group in by_size(part, where, made):
            positions = range(len(requests)) if group.rows is None else group.rows.tolist()
            assert len(positions) == len(group.requests)
            for i, position in enumerate(positions):
                assert position not in seen
                assert group.requests.local[i].tolist() == requests.local[position].tolist()
                seen[position] = group.selection.candidates
            assert group.requests.total == sum(lengths[p] for p in positions)
    assert sorted(seen) == list(range(len(rows)))
    for position, (length, i, j) in enumerate(rows):
        able = set(dict(local[i][1])) & set(dict(remote[j][1])) - {"inner"}
        order = ("far", "near") if length < 64 << 10 else ("near", "far")
        assert seen[position] == tuple(name for name in order if name in able)
