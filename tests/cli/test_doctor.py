"""`tent doctor`: what is looked at, and that what is wrong comes with its remedy."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tent_core import plugins, topology
from tent_core.doctor import limits, network
from tent_core.doctor.devices import devices
from tent_core.doctor.finding import Finding, Level
from tent_core.doctor.packages import packages
from tent_core.hookspecs import hookimpl
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import Capabilities


def test_this_machine_is_looked_at(run: Any) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.stdout
    found = [Finding(**finding) for finding in json.loads(result.stdout)]
    assert [f.topic for f in found if f.subject == "advertises"] == ["engine"]
    subjects = {f.subject for f in found}
    assert {"transport shm", "transport tcp", "memlock", "nofile", "ptrace scope"} <= subjects
    assert {"ports", "lo 127.0.0.1", "kernel modules"} <= subjects
    assert all(f.remedy for f in found if f.level in (Level.WARN, Level.BAD))


def test_people_get_topics_with_remedies(run: Any) -> None:
    result = run("doctor", "--transport", "tcp")
    assert result.exit_code == 0
    assert "only processes on this host can open it" in " ".join(result.stdout.split())
    assert "-> " in result.stdout


def test_an_engine_that_cannot_start_is_bad_and_gives_exit_status_1(run: Any) -> None:
    result = run("doctor", "--json", "--listen", "192.0.2.77:0")  # TEST-NET-1: no host has it
    assert result.exit_code == 1
    bad = [f for f in json.loads(result.stdout) if f["level"] == "bad"]
    assert len(bad) == 1
    assert "192.0.2.77" in bad[0]["found"]


def test_no_transport_at_all_is_bad(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "discover", lambda: plugins.Registry([]))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert any("none can carry" in f["found"] for f in json.loads(result.stdout))


@pytest.mark.parametrize(
    ("hard", "rdma", "level"),
    [
        (resource.RLIM_INFINITY, True, Level.OK),
        (8 << 20, True, Level.WARN),
        (8 << 20, False, Level.INFO),
        (2 << 30, True, Level.OK),
    ],
)
def test_a_small_memlock_matters_where_there_is_rdma(hard: int, rdma: bool, level: Level) -> None:
    finding = limits.memlock(hard, rdma)
    assert finding.level is level
    assert bool(finding.remedy) == (hard == 8 << 20)


def machine(root: Path, scope: str | None, capabilities: int) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    if scope is not None:
        (root / "proc/sys/kernel/yama").mkdir(parents=True)
        (root / "proc/sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    return root


@pytest.mark.parametrize(
    ("scope", "privileged", "level"),
    [
        (None, False, Level.OK),
        ("0", False, Level.OK),
        ("1", False, Level.WARN),
        ("1", True, Level.OK),
        ("2", True, Level.OK),
        ("3", True, Level.WARN),
    ],
)
def test_the_ptrace_scope_says_whether_shm_reaches_registered_memory(
    tmp_path: Path, scope: str | None, privileged: bool, level: Level
) -> None:
    finding = limits.ptrace_scope(machine(tmp_path, scope, 1 << 19 if privileged else 0))
    assert finding.level is level
    assert ("sysctl" in finding.remedy) == (level is Level.WARN)


def test_addresses_are_judged_by_who_can_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ipaddress import ip_address

    found = {
        "lo": "127.0.0.1",
        "eth0": "10.0.0.7",
        "docker0": "172.17.0.1",
        "eth1": "fd00::7",
        "eth2": "fe80::1",
    }
    pairs = [(name, ip_address(a)) for name, a in found.items()]
    monkeypatch.setattr(network, "addresses", lambda root: pairs)
    levels = {f.subject.split()[0]: f for f in network.network(tmp_path)}
    assert levels["docker0"].level is Level.WARN
    assert levels["eth0"].level is Level.OK
    assert "[fd00::7]:PORT" in levels["eth1"].found
    assert levels["lo"].level is levels["eth2"].level is Level.INFO


def test_ipv6_addresses_are_read_from_the_kernels_table(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    line = "fd000000000000000000000000000007 02 40 00 80     eth9\nnonsense\n"
    (tmp_path / "proc/net/if_inet6").write_text(line)
    assert ("eth9", "fd00::7") in [(n, str(a)) for n, a in network.addresses(tmp_path)]


def test_rdma_devices_are_shown_with_ports_and_gids_and_what_is_missing() -> None:
    gid = topology.Gid(3, "fe80::1", "RoCE v2", "eth0")
    port = topology.RdmaPort(1, "DOWN", "Ethernet", 100.0, (gid, topology.Gid(4, "::2")))
    found = devices(
        topology.Topology(
            nics=(topology.Nic("eth0", True, False, False, 9000, 100_000, numa_node=1),),
            rdma_devices=(
                topology.RdmaDevice("mlx5_0", pci_address="0000:01:00.0", ports=(port,)),
            ),
            modules=frozenset({"nvidia"}),
        )
    )
    by_subject = {f.subject: f for f in found}
    assert by_subject["ib_uverbs"].remedy == "modprobe ib_uverbs"
    assert by_subject["nvidia_peermem"].remedy == "modprobe nvidia_peermem"
    assert by_subject["RDMA mlx5_0 port 1"].level is Level.WARN
    assert "RoCE v2, eth0" in by_subject["RDMA mlx5_0 port 1 GID 3"].found
    assert "no network device" in by_subject["RDMA mlx5_0 port 1 GID 4"].found
    assert "100 Gb/s, NUMA node 1" in by_subject["NIC eth0"].found


def test_a_machine_without_rdma_is_told_how_to_try_it() -> None:
    (finding,) = [f for f in devices(topology.Topology()) if f.subject == "RDMA"]
    assert "rdma_rxe" in finding.remedy


def test_few_descriptors_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    finding = limits.nofile()
    assert finding.level is Level.WARN
    assert "256 descriptors" in finding.found
    assert "ulimit -Hn" in finding.remedy


def test_a_name_that_means_this_host_alone_should_not_be_advertised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(*addresses: str) -> Finding:
        answer = [(0, 0, 0, "", (a, 0)) for a in addresses]
        monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_: answer)
        return network.host_name()

    assert "to themselves" in resolved("127.0.1.1").found
    assert resolved("10.0.0.7", "fe80::1%eth0").remedy == ""


def test_a_machine_that_says_little_is_looked_at_all_the_same(tmp_path: Path) -> None:
    found = [*limits.limits(tmp_path, False), *limits.access(tmp_path), *network.network(tmp_path)]
    assert all(f.level in (Level.OK, Level.INFO, Level.WARN) for f in found)
    assert any(f.found == "/proc/meminfo does not say" for f in found)


class OwnSettings(BaseModel, extra="forbid"):
    number: int = 3


class Package:
    """A package of a transport, `own`, with a hook for the doctor."""

    @hookimpl
    def tent_transport(self) -> TransportDeclaration:
        return TransportDeclaration("own", 1001, self.make, OwnSettings, Capabilities())

    def make(self) -> Transport:
        raise AssertionError("the doctor's hook starts nothing")

    @hookimpl
    def tent_doctor(self, topology: topology.Topology, settings: OwnSettings) -> Any:
        return [Finding("own", str(topology.peer_memory), Level.OK, f"number {settings.number}")]


class Raising(Package):
    @hookimpl
    def tent_doctor(self) -> Any:
        raise LookupError("no stethoscope")


class Babbling(Package):
    @hookimpl
    def tent_doctor(self) -> Any:
        return ["fine"]


def asked(monkeypatch: pytest.MonkeyPatch, package: object, **own: Any) -> list[Finding]:
    monkeypatch.setattr(plugins, "discover", lambda: plugins.Registry.of(package))
    return packages({"transports": {"own": own}}, topology.Topology())


def test_packages_that_are_enabled_are_asked_with_the_machine_and_their_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(monkeypatch, Package(), number=7) == [
        Finding("own", "False", Level.OK, "number 7")
    ]
    assert asked(monkeypatch, Package(), enable=False) == []
    assert asked(monkeypatch, Package(), nonsense=7) == []  # the engine's start says so


@pytest.mark.parametrize(
    ("package", "why"), [(Raising(), "no stethoscope"), (Babbling(), "'fine', which is no Finding")]
)
def test_a_package_that_fails_when_it_is_asked_is_a_finding_itself(
    package: Package, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = asked(monkeypatch, package)
    assert (finding.topic, finding.level) == ("own", Level.BAD)
    assert why in finding.found
    assert finding.remedy
