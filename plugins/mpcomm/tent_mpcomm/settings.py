"""What YAML may say of the transport `mpcomm`: its ports, the library's tuning, what is given up when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval, MinLen

from tent_core.section import Check, Section
from tent_core.units import Microseconds, Seconds, Size
from tent_mpcomm.attribute import Malformed, check_host


def _host(text: str) -> str:
    try:
        return check_host(text)
    except Malformed as error:
        raise ValueError(str(error)) from None


def _device(name: str) -> str:
    if not name or "," in name or name != name.strip():
        raise ValueError(f"{name!r} is no name of a device, such as mlx5_0")
    return name


Port = Annotated[int, Interval(ge=1, le=65535)]
Device = Annotated[str, Check(_device)]


@dataclass(frozen=True, slots=True)
class Tuning(Section):
    """What the library reads from the environment, in the units of its variables. None leaves it to them.

    Ranges are those that the library's documentation gives; where it gives none, what cannot work is refused.
    """

    gid_index: Annotated[int, Interval(ge=-1, le=255)] | None = None
    nic_filter: Annotated[tuple[Device, ...], MinLen(1)] | None = None
    max_transfer_size: Annotated[Size, Ge(1)] | None = None
    qps_per_connection: Annotated[int, Interval(ge=1, le=16)] | None = None
    poll_batch_size: Annotated[int, Interval(ge=1, le=65536)] | None = None
    max_idle_spins: Annotated[int, Interval(ge=0, le=2**31 - 1)] | None = None
    max_send_wr: Annotated[int, Interval(ge=1, le=65536)] | None = None
    max_outstanding_per_qp: Annotated[int, Interval(ge=1, le=65536)] | None = None
    log_level: Literal["error", "warn", "info", "debug"] | None = None
    transfer_stats_interval: Annotated[int, Interval(ge=0, le=2**31 - 1)] | None = None


@dataclass(frozen=True, slots=True)
class Settings(Tuning):
    """Settings of the transport `mpcomm`, beside those of `Tuning`.

    - `listen_port`: of the library's handshake, on all interfaces; a free one is found when it is not given.
    - `advertise_host`, `advertise_port`: what peers are told; the engine's advertised host, and the port that
      is listened at, when they are not given.
    - `remote_port`: for peers that publish no handshake address: this port at the host of their segment name.
    - `gpu`: false keeps GPU memory away from it even where `nvidia_peermem` is loaded.
    - `connect_timeout`: until a peer's engine and its handshake port have answered.
    - `retire_after`: so many transfers that fail in succession give a connection up.
    - `max_retained`: connections of departed peers that are kept in the library, which cannot close them,
      until it is made anew.
    - `spin`, `poll_interval`: how long a thread looks for the end of transfers without a pause, and the
      longest pause that it makes then.
    - `window`: transfers of one submission that the library has at once.
    """

    listen_port: Port | None = None
    advertise_host: Annotated[str, Check(_host)] | None = None
    advertise_port: Port | None = None
    remote_port: Port | None = None
    gpu: bool = True
    connect_timeout: Annotated[Seconds, Interval(gt=0, le=60)] = 3.0
    retire_after: Annotated[int, Interval(ge=1, le=1_000_000)] = 3
    max_retained: Annotated[int, Interval(ge=0, le=1_000_000)] = 64
    spin: Annotated[Microseconds, Interval(ge=0, le=10_000)] = 50.0
    poll_interval: Annotated[Microseconds, Interval(gt=0, le=1_000_000)] = 1000.0
    window: Annotated[int, Interval(ge=1, le=65536)] = 1024
