"""Selection: which entry matches, which transports are candidates in which order, and why others are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core.policy import (
    PassedOver,
    PolicyEntry,
    Query,
    Selection,
    TransportFacts,
    default_policy,
    location_matches,
    match,
    select,
    size_edges,
)
from tent_core.types import (
    DRAM_TO_DRAM,
    Capabilities,
    Intent,
    MemoryKind,
    MemoryPair,
    Priority,
    Reach,
)

NETWORK = Capabilities(memory_pairs=DRAM_TO_DRAM, reach=Reach.NETWORK)
HOST = replace(NETWORK, reach=Reach.HOST)
FACTS = {
    "shm": TransportFacts("shm", 3, True, capabilities=HOST),
    "tcp": TransportFacts("tcp", 7, True, capabilities=NETWORK),
    "rdma": TransportFacts(
        "rdma", 1, True, capabilities=replace(NETWORK, device_choice=True, qp_pools=True)
    ),
}
OFFERS = {"shm": 3, "tcp": 7, "rdma": 1}
HERE = Query(4096, same_machine=True)
ANY = PolicyEntry("any", ("shm", "rdma", "tcp"))


def selection(
    *entries: PolicyEntry,
    query: Query = HERE,
    facts: Mapping[str, TransportFacts] = FACTS,
    local: Mapping[str, int] = OFFERS,
    remote: Mapping[str, int] = OFFERS,
    unreachable: Mapping[str, str] | None = None,
    hint: str | None = None,
) -> Selection:
    return select(entries or (ANY,), query, facts, local, remote, unreachable or {}, hint)


def reasons(found: Selection) -> dict[str, str]:
    return {out.name: out.reason for out in found.passed_over}


# ---------------------------------------------------------------- which entry


@pytest.mark.parametrize(
    ("field", "value", "matching", "other"),
    [
        ("segment_type", "memory", {"segment_type": "memory"}, {"segment_type": "file"}),
        ("same_machine", True, {"same_machine": True}, {"same_machine": False}),
        ("same_machine", False, {"same_machine": False}, {"same_machine": True}),
        ("local_memory", "cuda", {"local_memory": "cuda:1"}, {"local_memory": "cpu:0"}),
        ("remote_memory", "cuda:1", {"remote_memory": "cuda:1"}, {"remote_memory": "cuda:0"}),
        ("min_size", 100, {"size": 100}, {"size": 99}),
        ("max_size", 100, {"size": 100}, {"size": 101}),
        ("priority", Priority.HIGH, {"priority": Priority.HIGH}, {"priority": Priority.LOW}),
        ("intent", Intent.MIGRATION, {"intent": Intent.MIGRATION}, {"intent": Intent.UNSPEC}),
        ("intent", Intent.UNSPEC, {"intent": Intent.UNSPEC}, {"intent": Intent.MIGRATION}),
    ],
)
def test_an_entry_matches_what_its_fields_say(
    field: str, value: object, matching: dict[str, object], other: dict[str, object]
) -> None:
    entry = PolicyEntry("one", ("tcp",), **{field: value})  # type: ignore[arg-type]
    assert match([entry], replace(HERE, **matching)) is entry  # type: ignore[arg-type]
    assert match([entry], replace(HERE, **other)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "location", "matches"),
    [
        ("*", "cuda:7", True),
        ("*", "*", True),
        ("cpu", "cpu:0", True),
        ("cpu", "cpu", True),
        ("cpu:0", "cpu:0", True),
        ("cpu:0", "cpu:01", False),
        ("cpu:0", "cpu:1", False),
        ("cpu:0", "cpu", False),
        ("cp", "cpu:0", False),
        ("cuda", "cpu:0", False),
        ("cpu", "*", True),
        ("cpu:0", "*", False),
        ("cuda", "*", False),
        ("file", "file:/kv", True),
    ],
)
def test_a_pattern_fits_a_kind_of_memory_or_one_device(
    pattern: str, location: str, matches: bool
) -> None:
    assert location_matches(pattern, location) is matches


def test_both_bounds_of_a_size_are_inclusive() -> None:
    entry = PolicyEntry("one", ("tcp",), min_size=10, max_size=20)
    assert [size for size in range(30) if match([entry], replace(HERE, size=size))] == list(
        range(10, 21)
    )


def test_a_request_that_names_an_entry_gets_it_whatever_its_fields_say() -> None:
    big = PolicyEntry("big", ("tcp",), min_size=2**20)
    assert match([ANY, big], replace(HERE, policy_name="big")) is big
    assert match([ANY, big], replace(HERE, policy_name="bigger")) is None
    assert selection(ANY, big, query=replace(HERE, policy_name="bigger")) == Selection(None)


def test_without_a_policy_the_order_is_shm_rdma_mpcomm_tcp_and_the_others_by_name() -> None:
    (entry,) = default_policy(["tcp", "ub", "mock", "mpcomm", "rdma", "shm", "gds"])
    assert entry.transports == ("shm", "rdma", "mpcomm", "tcp", "gds", "mock", "ub")
    assert default_policy(["tcp"])[0].transports == ("tcp",)


# ---------------------------------------------------------------- which transports


def test_candidates_come_in_the_order_of_the_entry() -> None:
    assert selection().candidates == ("shm", "rdma", "tcp")
    assert selection(PolicyEntry("any", ("tcp", "rdma", "shm"))).candidates == (
        "tcp",
        "rdma",
        "shm",
    )
    assert not selection().passed_over


def test_a_hint_moves_one_transport_first_and_keeps_the_rest_in_order() -> None:
    assert selection(hint="tcp").candidates == ("tcp", "shm", "rdma")
    assert selection(hint="shm").candidates == ("shm", "rdma", "tcp")


def test_a_hint_at_a_transport_that_the_entry_does_not_list_is_visible_and_changes_nothing() -> (
    None
):
    found = selection(PolicyEntry("two", ("shm", "tcp")), hint="rdma")
    assert found.candidates == ("shm", "tcp")
    assert found.passed_over == (PassedOver("rdma", "hinted at, but entry 'two' does not list it"),)


@pytest.mark.parametrize(
    ("changes", "name", "part"),
    [
        ({"facts": {k: v for k, v in FACTS.items() if k != "rdma"}}, "rdma", "not enabled"),
        (
            {"facts": {**FACTS, "rdma": TransportFacts("rdma", 1, False, "no device")}},
            "rdma",
            "no device",
        ),
        ({"facts": {**FACTS, "rdma": TransportFacts("rdma", 1, True)}}, "rdma", "cannot move"),
        ({"query": replace(HERE, same_machine=False)}, "shm", "another machine"),
        ({"query": replace(HERE, local_memory="cuda:0")}, "tcp", "between gpu here and dram"),
        ({"query": replace(HERE, remote_memory="file:/kv")}, "tcp", "dram here and file"),
        ({"local": {"shm": 3, "tcp": 7}}, "rdma", "local buffer"),
        ({"remote": {"shm": 3, "tcp": 7}}, "rdma", "peer's buffer"),
        ({"remote": {**OFFERS, "rdma": 1001}}, "rdma", "number 1001, here 1"),
        ({"unreachable": {"shm": "another user"}}, "shm", "another user"),
    ],
)
def test_a_transport_that_cannot_carry_it_is_passed_over_with_the_reason(
    changes: dict[str, object], name: str, part: str
) -> None:
    found = selection(**changes)  # type: ignore[arg-type]
    assert name not in found.candidates
    assert part in reasons(found)[name]


def test_an_entry_that_asks_for_devices_or_a_pool_passes_over_what_cannot_be_told() -> None:
    devices = selection(replace(ANY, devices=("mlx5_0", "mlx5_1")))
    assert devices.candidates == ("rdma",)
    assert set(reasons(devices)) == {"shm", "tcp"}
    assert "mlx5_0, mlx5_1" in reasons(devices)["tcp"]
    pool = selection(replace(ANY, qp_pool="foreground"))
    assert pool.candidates == ("rdma",)
    assert "'foreground'" in reasons(pool)["shm"]


def test_a_request_above_the_largest_one_of_a_transport_goes_to_the_next() -> None:
    limited = replace(HOST, largest_request=1000)
    facts = {**FACTS, "shm": TransportFacts("shm", 3, True, capabilities=limited)}
    assert selection(query=replace(HERE, size=1000), facts=facts).candidates[0] == "shm"
    over = selection(query=replace(HERE, size=1001), facts=facts)
    assert over.candidates == ("rdma", "tcp")
    assert "1,000 bytes" in reasons(over)["shm"]


def test_two_private_transports_with_one_number_or_one_name_are_no_candidates_for_each_other() -> (
    None
):
    facts = {"mine": TransportFacts("mine", 1001, True, capabilities=NETWORK)}
    entry = PolicyEntry("any", ("mine",))
    renamed = selection(entry, facts=facts, local={"mine": 1001}, remote={"yours": 1001})
    renumbered = selection(entry, facts=facts, local={"mine": 1001}, remote={"mine": 1002})
    assert renamed.candidates == renumbered.candidates == ()


# ---------------------------------------------------------------- properties

NAMES = ("shm", "rdma", "tcp", "mine", "absent")
SIZES = st.integers(1, 40)

capabilities = st.builds(
    Capabilities,
    memory_pairs=st.sampled_from(
        [
            frozenset(),
            DRAM_TO_DRAM,
            DRAM_TO_DRAM | {MemoryPair(MemoryKind.GPU, MemoryKind.DRAM)},
        ]
    ),
    reach=st.sampled_from(Reach),
    device_choice=st.booleans(),
    qp_pools=st.booleans(),
    largest_request=st.none() | SIZES,
)
facts_of = st.fixed_dictionaries(
    {
        name: st.builds(
            TransportFacts,
            st.just(name),
            st.integers(1, 2),
            st.booleans(),
            st.just("down"),
            st.none() | capabilities,
        )
        for name in NAMES[:-1]
    }
)
entries = st.lists(
    st.builds(
        PolicyEntry,
        name=st.sampled_from("abc"),
        transports=st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(tuple),
        segment_type=st.sampled_from([None, "memory", "file"]),
        same_machine=st.sampled_from([None, True, False]),
        local_memory=st.sampled_from([None, "*", "cpu", "cpu:1", "cuda"]),
        remote_memory=st.sampled_from([None, "*", "cpu", "cuda"]),
        min_size=st.just(0) | SIZES,
        max_size=st.none() | SIZES,
        priority=st.none() | st.sampled_from(Priority),
        intent=st.none() | st.sampled_from(Intent),
        devices=st.sampled_from([(), ("mlx5_0",)]),
        qp_pool=st.sampled_from([None, "fast"]),
    ),
    max_size=4,
)
queries = st.builds(
    Query,
    size=SIZES,
    segment_type=st.sampled_from(["memory", "file"]),
    same_machine=st.booleans(),
    local_memory=st.sampled_from(["cpu:0", "cpu:1", "cuda:0", "*"]),
    remote_memory=st.sampled_from(["cpu:0", "cuda:0"]),
    priority=st.sampled_from(Priority),
    intent=st.sampled_from(Intent),
    policy_name=st.sampled_from([None, None, "a", "z"]),
)
offers = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2))
unreachable = st.dictionaries(st.sampled_from(NAMES), st.just("too far"), max_size=2)
hints = st.none() | st.sampled_from((*NAMES, "unheard_of"))


@given(entries, queries, facts_of, offers, offers, unreachable, hints)
def test_every_transport_of_the_entry_is_a_candidate_or_passed_over_with_a_reason(
    entries: list[PolicyEntry],
    query: Query,
    facts: dict[str, TransportFacts],
    local: dict[str, int],
    remote: dict[str, int],
    unreachable: dict[str, str],
    hint: str | None,
) -> None:
    found = select(entries, query, facts, local, remote, unreachable, hint)
    assert found.entry is match(entries, query)
    if found.entry is None:
        assert found == Selection(None)
        return
    ordered = found.entry.transports
    if hint in ordered:
        ordered = (hint, *(name for name in ordered if name != hint))
    out = [passed.name for passed in found.passed_over if passed.name in ordered]
    assert sorted((*found.candidates, *out)) == sorted(ordered)
    assert found.candidates == tuple(name for name in ordered if name in found.candidates)
    assert all(passed.reason for passed in found.passed_over)
    assert {passed.name for passed in found.passed_over} - set(ordered) <= {hint}


@given(entries, queries, facts_of, offers, offers, unreachable)
def test_a_candidate_can_do_it_and_is_offered_on_both_sides(
    entries: list[PolicyEntry],
    query: Query,
    facts: dict[str, TransportFacts],
    local: dict[str, int],
    remote: dict[str, int],
    unreachable: dict[str, str],
) -> None:
    found = select(entries, query, facts, local, remote, unreachable)
    for name in found.candidates:
        fact = facts[name]
        assert fact.available
        assert local[name] == remote[name] == fact.number
        assert name not in unreachable
        assert fact.capabilities is not None
        assert found.entry is not None
        assert fact.capabilities.device_choice or not found.entry.devices
        assert fact.capabilities.qp_pools or found.entry.qp_pool is None
        assert (fact.capabilities.largest_request or query.size) >= query.size


@given(entries, queries)
def test_the_first_match_wins(entries: list[PolicyEntry], query: Query) -> None:
    unnamed = replace(query, policy_name=None)
    found = match(entries, unnamed)
    alone = [entry for entry in entries if match([entry], unnamed) is not None]
    assert found is (alone[0] if alone else None)


@given(queries)
def test_an_entry_without_match_fields_matches_anything(query: Query) -> None:
    assert match([ANY], replace(query, policy_name=None)) is ANY


@given(entries, queries, facts_of, offers, offers, hints)
def test_between_two_edges_all_sizes_select_alike(
    entries: list[PolicyEntry],
    query: Query,
    facts: dict[str, TransportFacts],
    local: dict[str, int],
    remote: dict[str, int],
    hint: str | None,
) -> None:
    edges = size_edges(entries, facts)
    assert list(edges) == sorted(set(edges))
    assert all(edge > 0 for edge in edges)

    def at(size: int) -> Selection:
        return select(entries, replace(query, size=size), facts, local, remote, {}, hint)

    for size in range(2, 45):
        if size not in edges:
            assert at(size) == at(size - 1)


def test_edges_are_where_the_answer_changes_and_nowhere_else() -> None:
    facts = {
        **FACTS,
        "shm": TransportFacts("shm", 3, True, capabilities=replace(HOST, largest_request=1000)),
    }
    policy = (PolicyEntry("mid", ("tcp",), min_size=65, max_size=99), ANY)
    assert size_edges(policy, facts) == (65, 100, 1001)
    assert size_edges((ANY,), FACTS) == ()


def test_selection_is_used_without_importing_pydantic() -> None:
    code = "import tent_core.policy, sys; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
