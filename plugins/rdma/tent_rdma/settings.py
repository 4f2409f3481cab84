"""What YAML may say of the transport `rdma`, with the reasons behind the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from tent_core.mistakes import NotAllowed
from tent_core.section import Section
from tent_core.units import Microseconds, Seconds, Size, format_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceSettings(Section):
    """What is overridden for one device: `port`, `gid_index`. What is not given is chosen."""

    port: Annotated[int, Interval(ge=1, le=255)] | None = None
    gid_index: Annotated[int, Interval(ge=0, le=65535)] | None = None


@dataclass(frozen=True, slots=True)
class PoolSettings(Section):
    """A named pool of queue pairs, of its own for each peer, and how its packets are marked.

    - `queue_pairs`: data queue pairs per connection. A device works on each with one engine at a time
      (soft-RoCE: on one processor), so one alone cannot use all of it.
    - `service_level`: 0 to 15, the priority on InfiniBand and on Ethernet by its mapping.
    - `traffic_class`: 0 to 255, on RoCE v2 the byte of DSCP and ECN.
    """

    queue_pairs: Annotated[int, Interval(ge=1, le=64)] = 2
    service_level: Annotated[int, Interval(ge=0, le=15)] = 0
    traffic_class: Annotated[int, Interval(ge=0, le=255)] = 0


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """Settings of the transport `rdma`.

    - `devices`: names of the devices that may be used, all if it is empty; `exclude`: those that may not.
    - `device`: by name, what is overridden for a device.
    - `ip_version`: which kind of RoCE v2 address is preferred where a port has both.
    - `nic_priority`: by memory location, lists of devices in falling order of preference, such as
      `{"cpu:0": [[mlx5_0, mlx5_1], [mlx5_2]]}`; without it the distance between NUMA nodes decides.
    - `pools`: named pools; `default` is used by requests whose policy entry names none.
    - `max_connections`: per NIC, the most that are kept; those that this side began make room, the ones that
      were not used since they were looked at first.
    - `send_depth`: work requests outstanding on one queue pair.
    - `group`: the most work requests that are posted, and complete, together; of long ones, more than 1 MiB
      together, a quarter at least.
    - `slice`: a larger request is cut into work requests of this size, `largest_slice` at the most for very
      long ones, so that all rails take part.
    - `rail_choice`: `predicted` weighs what is under way against the measured bandwidth of each rail.
    - `numa_penalty`: how much longer a rail on another NUMA node is assumed to take.
    - `probe_every`: one group in so many goes to the rail that was used the longest ago.
    - `error_threshold`, `error_window`, `cooldown`, `longest_cooldown`: a rail that fails so often in the
      window pauses, twice as long each time.
    - `acknowledge_timeout`: exponent of the time until a packet is sent again, 4.096 us * 2^n, and `retries`
      how often (ibv_modify_qp(3)). With 7 soft-RoCE never gives up, measured: it does not notice a peer's
      queue pair that is gone.
    - `pollers`: threads that wait for completions; `spin`: how long a thread looks before it sleeps.
    - `largest_registration`: bytes that one registration may span where the device allows more.
    - `connect_timeout`: until a connection is made; `drain_timeout`: until a failed one has let go.
    - `notifications`: send notifications by queue pairs; else by the control plane.
    """

    devices: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    device: dict[str, DeviceSettings] = field(default_factory=dict)
    ip_version: Literal[4, 6] = 4
    nic_priority: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    pools: dict[str, PoolSettings] = field(default_factory=dict)
    max_connections: Annotated[int, Interval(ge=1, le=65536)] = 256
    send_depth: Annotated[int, Interval(ge=16, le=8192)] = 256
    group: Annotated[int, Interval(ge=1, le=1024)] = 64
    slice: Annotated[Size, Interval(ge=4 * KIB, le=1 * GIB)] = 64 * KIB
    largest_slice: Annotated[Size, Interval(ge=4 * KIB, le=1 * GIB)] = 1 * MIB
    rail_choice: Literal["predicted", "round_robin"] = "predicted"
    numa_penalty: Annotated[float, Interval(ge=1, le=100)] = 1.5
    probe_every: Annotated[int, Interval(ge=2, le=1_000_000)] = 64
    error_threshold: Annotated[int, Interval(ge=1, le=1000)] = 3
    error_window: Annotated[Seconds, Gt(0)] = 10.0
    cooldown: Annotated[Seconds, Gt(0)] = 1.0
    longest_cooldown: Annotated[Seconds, Gt(0)] = 60.0
    acknowledge_timeout: Annotated[int, Interval(ge=1, le=31)] = 14
    retries: Annotated[int, Interval(ge=0, le=7)] = 6
    pollers: Annotated[int, Interval(ge=1, le=16)] = 1
    spin: Annotated[Microseconds, Interval(ge=0, le=10_000)] = 50.0
    largest_registration: Annotated[Size, Ge(64 * KIB)] = 64 * GIB
    connect_timeout: Annotated[Seconds, Gt(0)] = 5.0
    drain_timeout: Annotated[Seconds, Gt(0)] = 2.0
    notifications: bool = True

    @classmethod
    def conflicts(cls, read: Mapping[str, Any]) -> Iterator[tuple[str, NotAllowed]]:
        """Slices and groups beyond their limits, and devices that may and may not be used."""
        cut, largest = read.get("slice"), read.get("largest_slice")
        if cut is not None and largest is not None and cut > largest:
            yield "slice", NotAllowed(f"at most largest_slice, which is {format_size(largest)}")
        both = set(read.get("devices", ())) & set(read.get("exclude", ()))
        if both:
            names = ", ".join(sorted(both))
            yield "exclude", NotAllowed(f"none of devices, which has {names}, too")
        group, depth = read.get("group"), read.get("send_depth")
        if group is not None and depth is not None and group > depth:
            yield "group", NotAllowed(f"at most send_depth, which is {depth}: more would never fit")
