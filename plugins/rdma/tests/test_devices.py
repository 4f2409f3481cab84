"""Which devices, ports and GIDs are used, how near they are to a memory, and which NICs form rails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tent_core import models
from tent_core.errors import ConfigError, TransportUnavailable
from tent_core.topology import Gid, NumaNode, RdmaDevice, RdmaPort, Topology
from tent_rdma.devices import Choice, ChosenDevice, DeviceMistake, choose, pair, ranks
from tent_rdma.settings import Settings

V4, V6, LOCAL = (
    "0000:0000:0000:0000:0000:ffff:0a00:0001",
    "fd00:0000:0000:0000:0000:0000:0000:0001",
    "fe80:0000:0000:0000:9a03:9bff:fe12:3456",
)
V1_LOCAL = Gid(0, LOCAL, "IB/RoCE v1", "eth0")
V2_LOCAL = Gid(1, LOCAL, "RoCE v2", "eth0")
V1_V4 = Gid(2, V4, "IB/RoCE v1", "eth0")
V2_V4 = Gid(3, V4, "RoCE v2", "eth0")
V2_V6 = Gid(5, V6, "RoCE v2", "eth0")
V2_V4_NOWHERE = Gid(1, V4, "RoCE v2", "")


def port(*gids: Gid, number: int = 1, state: str = "ACTIVE", layer: str = "Ethernet") -> RdmaPort:
    return RdmaPort(number, state, layer, 100.0, gids or (V2_V4,))


def machine(*devices: RdmaDevice | str, **more: Any) -> Topology:
    made = tuple(
        RdmaDevice(d, ports=(port(),), node_type="CA") if isinstance(d, str) else d for d in devices
    )
    return Topology(rdma_devices=made, **more)


def only(topology: Topology, **settings: Any) -> ChosenDevice:
    (chosen,) = choose(topology, models.make(Settings, **settings)).chosen
    return chosen


def gid_of(*gids: Gid, **settings: Any) -> int:
    return only(machine(RdmaDevice("mlx5_0", ports=(port(*gids),))), **settings).gid_index


def test_every_device_is_used_unless_lists_say_otherwise() -> None:
    topology = machine("mlx5_0", "mlx5_1", "mlx5_2")

    def names(choice: Choice) -> list[str]:
        return [device.name for device in choice.chosen]

    assert names(choose(topology, Settings())) == ["mlx5_0", "mlx5_1", "mlx5_2"]
    allowed = choose(topology, Settings(devices=("mlx5_2", "mlx5_0")))
    assert names(allowed) == ["mlx5_0", "mlx5_2"]
    assert allowed.rejected == (("mlx5_1", "not among the devices of the settings"),)
    denied = choose(topology, Settings(exclude=("mlx5_1",)))
    assert names(denied) == ["mlx5_0", "mlx5_2"]
    assert denied.rejected == (("mlx5_1", "excluded by the settings (exclude)"),)


def test_roce_v2_with_an_address_of_the_preferred_version_is_taken() -> None:
    everything = (V1_LOCAL, V2_LOCAL, V1_V4, V2_V4, V2_V6)
    assert gid_of(*everything) == 3
    assert gid_of(*everything, ip_version=6) == 5
    assert gid_of(V1_LOCAL, V2_LOCAL, V1_V4, V2_V6) == 5
    assert gid_of(V1_LOCAL, V2_LOCAL, V1_V4) == 1
    assert gid_of(V1_LOCAL, V1_V4) == 0


def test_a_gid_without_a_network_device_is_taken_only_before_those_of_other_kinds() -> None:
    assert gid_of(V2_V4_NOWHERE, V2_V6) == 5
    assert gid_of(V1_LOCAL, V2_V4_NOWHERE) == 1


def test_an_ipv4_link_local_address_is_no_better_than_an_ipv6_one() -> None:
    assert gid_of(Gid(1, "::ffff:169.254.0.1", "RoCE v2", "eth0"), V2_V6) == 5


def test_on_infiniband_the_first_gid_is_taken() -> None:
    ib = port(Gid(0, LOCAL), Gid(1, V6), layer="InfiniBand")
    chosen = only(machine(RdmaDevice("mlx5_0", ports=(ib,))))
    assert (chosen.gid_index, chosen.link_layer, chosen.netdev) == (0, "InfiniBand", "")


def test_the_gid_and_the_port_can_be_told_for_each_device() -> None:
    ports = (port(V2_V4, V2_V6), port(V2_V6, number=2))
    topology = machine(RdmaDevice("mlx5_0", ports=ports), "mlx5_1")
    told = models.make(Settings, device={"mlx5_0": {"port": 2, "gid_index": 5}})
    first, second = choose(topology, told).chosen
    assert (first.port, first.gid_index, first.gid) == (2, 5, V6)
    assert (second.port, second.gid_index) == (1, 3)
    assert "by the settings" in first.reason
    assert "by the settings" not in second.reason


def test_an_active_port_comes_before_one_that_is_down() -> None:
    useless = RdmaPort(1, "ACTIVE", "Ethernet")  # it has no GID
    ports = (useless, port(number=2, state="DOWN"), port(number=3), port(number=4))
    chosen = only(machine(RdmaDevice("mlx5_0", ports=ports)))
    assert (chosen.port, chosen.active) == (3, True)


def test_a_device_whose_port_is_down_is_kept_and_marked() -> None:
    chosen = only(machine(RdmaDevice("mlx5_0", ports=(port(state="DOWN"),))))
    assert not chosen.active
    assert "DOWN, used when it comes up" in chosen.reason


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (RdmaDevice("x", node_type="RNIC", ports=(port(),)), "RNIC"),
        (RdmaDevice("x"), "has no port"),
        (
            RdmaDevice("x", ports=(RdmaPort(1, "DOWN", "Ethernet"),)),
            "give its interface an address",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_passed_over_with_the_reason(
    device: RdmaDevice, reason: str
) -> None:
    choice = choose(machine(device, "y"), Settings())
    assert [chosen.name for chosen in choice.chosen] == ["y"]
    ((name, why),) = choice.rejected
    assert name == "x"
    assert reason in why
    with pytest.raises(TransportUnavailable, match=reason):
        choose(machine(device), Settings())


def test_a_machine_without_devices_is_told_how_to_try_it() -> None:
    with pytest.raises(TransportUnavailable, match=r"no RDMA device; .*rdma_rxe"):
        choose(Topology(), Settings(devices=("mlx5_0",)))


def test_names_and_numbers_that_do_not_exist_are_all_reported_with_what_does() -> None:
    topology = machine(RdmaDevice("mlx5_0", ports=(port(V2_V4),)), "mlx5_1")
    settings = models.make(
        Settings,
        devices=("mlx5_O", "mlx5_1"),
        exclude=("eth0",),
        device={"mlx5_0": {"gid_index": 9}, "mlx5_1": {"port": 2}, "mlx4_0": {}},
        nic_priority={"cpu:0": (("mlx5_1",), ("mlx5_7",)), "gpu one": (("mlx5_1",),)},
    )
    with pytest.raises(DeviceMistake) as caught:
        choose(topology, settings)
    text = "\n".join(caught.value.mistakes)
    assert len(caught.value.mistakes) == 7
    assert "devices: no RDMA device 'mlx5_O' here (did you mean 'mlx5_" in text
    assert "exclude: no RDMA device 'eth0' here; there are: mlx5_0, mlx5_1" in text
    assert "device: no RDMA device 'mlx4_0'" in text
    assert "port 1 has no GID 9; there are: 3 = 10.0.0.1 on eth0 (RoCE v2)" in text
    assert "device.mlx5_1.port: there is no port 2; there are: 1" in text
    assert "nic_priority.cpu:0: no RDMA device 'mlx5_7'" in text
    assert "'gpu one'" in text


gids = st.lists(
    st.builds(
        Gid,
        st.integers(0, 300),
        st.one_of(st.sampled_from([V4, V6, LOCAL]), st.text(max_size=12)),
        st.sampled_from(["", "IB/RoCE v1", "RoCE v2"]),
        st.sampled_from(["", "eth0"]),
    ),
    max_size=4,
    unique_by=lambda gid: gid.index,
).map(tuple)
ports = st.lists(
    st.builds(
        RdmaPort,
        st.integers(1, 9),
        st.sampled_from(["ACTIVE", "DOWN", ""]),
        st.sampled_from(["Ethernet", "InfiniBand", ""]),
        gids=gids,
    ),
    max_size=3,
    unique_by=lambda port: port.number,
).map(tuple)
devices = st.lists(
    st.builds(RdmaDevice, st.sampled_from("abcdef"), numa_node=st.integers(-1, 3), ports=ports),
    max_size=4,
    unique_by=lambda device: device.name,
).map(tuple)


@given(devices, st.sampled_from([4, 6]))
def test_each_device_is_chosen_with_what_exists_or_rejected_with_a_reason(
    found: tuple[RdmaDevice, ...], version: int
) -> None:
    topology = Topology(rdma_devices=found)
    try:
        choice = choose(topology, Settings(ip_version=version))
    except TransportUnavailable:
        assert not any(port.gids for device in found for port in device.ports)
        return
    names = [device.name for device in choice.chosen] + [name for name, _ in choice.rejected]
    assert sorted(names) == sorted(device.name for device in found)
    assert all(reason for _, reason in choice.rejected)
    for chosen in choice.chosen:
        device = topology.rdma_device(chosen.name)
        assert device is not None
        (port,) = [port for port in device.ports if port.number == chosen.port]
        assert chosen.gid in [gid.value for gid in port.gids if gid.index == chosen.gid_index]
        active = [port for port in device.ports if port.state == "ACTIVE" and port.gids]
        assert chosen.active or not active


def on_nodes(*nodes: int) -> tuple[ChosenDevice, ...]:
    topology = machine(
        *(RdmaDevice(f"mlx5_{i}", numa_node=n, ports=(port(),)) for i, n in enumerate(nodes))
    )
    return choose(topology, Settings()).chosen


FOUR_NODES = Topology(
    numa_nodes=tuple(
        NumaNode(i, distances=d)
        for i, d in ((0, (10, 12, 32)), (1, (12, 10, 32)), (3, (32, 32, 10)))
    )
)


def test_nics_of_the_same_numa_node_come_first_then_by_distance() -> None:
    chosen = on_nodes(0, 3, 1, 0)
    assert ranks("cpu:0", chosen, FOUR_NODES, Settings()) == ((0, 3), (2,), (1,))
    assert ranks("cpu:1", chosen, FOUR_NODES, Settings()) == ((2,), (0, 3), (1,))
    assert ranks("cpu:3", chosen, FOUR_NODES, Settings()) == ((1,), (0, 2, 3))


def test_where_a_node_is_not_known_nobody_is_put_back() -> None:
    assert ranks("cpu:0", on_nodes(-1, 0), FOUR_NODES, Settings()) == ((0, 1),)
    assert ranks("cpu:0", on_nodes(0, 1), Topology(), Settings()) == ((0, 1),)
    silent = Topology(numa_nodes=(NumaNode(0), NumaNode(1)))  # of distances
    assert ranks("cpu:0", on_nodes(1, 0), silent, Settings()) == ((1,), (0,))
    assert ranks("cpu:9", on_nodes(0, 1), FOUR_NODES, Settings()) == ((0, 1),)
    for location in ("cpu", "*", "cuda:1"):
        assert ranks(location, on_nodes(0, 1, 3), FOUR_NODES, Settings()) == ((0, 1, 2),)


def test_the_priority_of_the_settings_decides_and_what_it_leaves_out_comes_last() -> None:
    settings = Settings(
        nic_priority={
            "cpu:0": (("mlx5_2",), ("mlx5_0",)),
            "cuda": (("mlx5_1", "mlx5_0"),),
            "*": (("mlx5_1",),),
        }
    )
    chosen = on_nodes(0, 0, 3)
    assert ranks("cpu:0", chosen, FOUR_NODES, settings) == ((2,), (0,), (1,))
    assert ranks("cuda:7", chosen, FOUR_NODES, settings) == ((0, 1), (2,))
    assert ranks("cpu:1", chosen, FOUR_NODES, settings) == ((1,), (0, 2))
    assert ranks("cpu:0", chosen[:2], FOUR_NODES, settings) == ((0,), (1,))


@given(
    devices,
    st.sampled_from(["cpu:0", "cpu:3", "cuda:0", "*"]),
    st.booleans(),
)
def test_every_nic_has_exactly_one_rank(
    found: tuple[RdmaDevice, ...], location: str, told: bool
) -> None:
    try:
        chosen = choose(Topology(rdma_devices=found), Settings()).chosen
    except TransportUnavailable:
        return
    priority = {"*": ((chosen[0].name,), (chosen[-1].name, chosen[0].name))} if told else {}
    tiers = ranks(location, chosen, FOUR_NODES, Settings(nic_priority=priority))
    assert sorted(i for tier in tiers for i in tier) == list(range(len(chosen)))
    assert all(tiers)


@dataclass(frozen=True)
class Info:
    name: str
    gid: str = V4
    link_layer: str = "Ethernet"


def named(*names: str) -> list[Info]:
    return [Info(name) for name in names]


def test_nics_of_one_name_form_rails_wherever_they_stand() -> None:
    assert pair(named("a", "b"), named("b", "a"))[:2] == [(0, 1), (1, 0)]


def test_nics_of_other_names_form_rails_by_their_index() -> None:
    assert pair(named("a", "b"), named("x", "y"))[:2] == [(0, 0), (1, 1)]
    # b has its namesake at 0, so that a takes what is left.
    assert pair(named("a", "b", "c"), named("b", "x", "y"))[:3] == [(0, 1), (1, 0), (2, 2)]


def test_a_peer_with_fewer_nics_gets_an_even_share_on_each() -> None:
    own = pair(named("a", "b", "c", "d"), named("a", "b"))[:4]
    assert own == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_alternates_come_after_every_nic_has_its_own_peer() -> None:
    assert pair(named("a", "b"), named("a", "b", "c")) == [
        *((0, 0), (1, 1)),
        *((0, 1), (1, 2)),
        *((0, 2), (1, 0)),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Info("a", V4), Info("a", V6)),
        (Info("a", V4), Info("a", V4, "InfiniBand")),
        (Info("a", V4), Info("a", "nonsense")),
    ],
)
def test_nics_that_cannot_understand_each_other_form_no_rail(one: Info, other: Info) -> None:
    assert pair([one], [other]) == []
    assert pair([one], [other, Info("b")]) == [(0, 1)]


infos = st.lists(
    st.builds(
        Info,
        st.sampled_from("abcdefgh"),
        st.sampled_from([V4, V6, "?"]),
        st.sampled_from(["Ethernet", "InfiniBand"]),
    ),
    max_size=6,
    unique_by=lambda nic: nic.name,
)


@given(infos, infos)
def test_every_pair_that_can_work_is_named_once_and_every_nic_that_has_one_comes_early(
    local: Sequence[Info], remote: Sequence[Info]
) -> None:
    def reach(a: Info, b: Info) -> bool:
        return a.link_layer == b.link_layer and (
            a.link_layer == "InfiniBand" or (a.gid == b.gid and a.gid != "?")
        )

    able = {(i, j) for i, a in enumerate(local) for j, b in enumerate(remote) if reach(a, b)}
    pairs = pair(local, remote)
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == able
    locals_with_peer = {i for i, _ in able}
    assert {i for i, _ in pairs[: len(locals_with_peer)]} == locals_with_peer


@given(st.integers(1, 8), st.integers(1, 8))
def test_no_nic_of_a_peer_is_taken_twice_before_all_are_taken(here: int, there: int) -> None:
    own = pair(named(*"abcdefgh"[:here]), named(*"stuvwxyz"[:there]))[:here]
    uses = [[j for _, j in own].count(j) for j in range(there)]
    assert max(uses) - min(uses) <= 1


@given(st.permutations("abcde"), st.permutations("abcde"))
def test_both_sides_choose_the_same_rails_when_they_have_the_same_names(
    one: list[str], other: list[str]
) -> None:
    forth = pair(named(*one), named(*other))[:5]
    back = pair(named(*other), named(*one))[:5]
    assert {(j, i) for i, j in forth} == set(back)


def test_settings_that_do_not_go_together_are_all_reported_with_their_limits() -> None:
    with pytest.raises(ConfigError) as caught:
        models.make(Settings, slice="2MiB", send_depth=32, devices=["a", "b"], exclude=["b"])
    assert [line.split(": ")[0] for line in caught.value.mistakes] == ["slice", "exclude", "group"]
    for limit in ("largest_slice, which is 1MiB", "has b, too", "send_depth, which is 32"):
        assert limit in str(caught.value)
