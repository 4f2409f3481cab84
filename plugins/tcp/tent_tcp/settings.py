"""What YAML may say of the transport `tcp`, with the measurements behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Interval

from tent_core import address
from tent_core.section import Check, Section
from tent_core.units import Microseconds, Seconds, Size

MIB = 1 << 20


def _reachable(host: str) -> str:
    if address.is_wildcard(host):
        raise ValueError(f"{host} can be listened on, not reached: name an address or a host name")
    return host


Host = Annotated[str, Check(address.parse_host)]
"""A host name, an IPv4 address, or an IPv6 address with or without brackets; no port."""


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """Settings of the transport `tcp`.

    - `listen`: address on which the data port listens; the engine's control address when it is not given.
    - `port`: number of the data port, 0 for any that is free. What is advertised is what was bound.
    - `advertise`: host that peers connect to; without it the address of `listen`, if that is given, else the
      engine's advertised host.
    - `streams`: connections that are kept to a peer at most; each carries one transfer at a time. Eight
      threads with blocks of 64 KiB had 0.80 of one thread's rate with four, and 0.96 with eight.
    - `max_streams`: connections that peers may have open to this engine.
    - `connect_timeout`, `handshake_timeout`: for a connection to be made; for a new one to show its secret.
    - `stall_timeout`: how long a transfer may go without moving a byte before its stream is given up.
    - `fence_timeout`: how long a write whose stream was lost waits for its peer to say that it reads that
      stream no more, so that another path may carry it; without the answer its outcome is unknown.
    - `spin`: how long a thread looks for an answer before it sleeps.
    - `receiver_spin`: how long the receiver looks for more after something came, yielding all the while;
      where other threads want all processors it sleeps between messages at once.
    - `keep_gil`: while other threads of the process compute, messages of up to this size are moved without
      giving up the GIL between calls, since it would come back a switch interval (5 ms) later.
    - `socket_buffer`: size of the socket buffers at both ends; 0 leaves them to the kernel's autotuning,
      which was as good as any fixed size from 128 KiB to 1 MiB, or better, also with a busy receiver.
    """

    listen: Host | None = None
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    advertise: Annotated[Host, Check(_reachable)] | None = None
    streams: Annotated[int, Interval(ge=1, le=64)] = 8
    max_streams: Annotated[int, Interval(ge=1, le=65536)] = 1024
    connect_timeout: Annotated[Seconds, Gt(0)] = 5.0
    handshake_timeout: Annotated[Seconds, Gt(0)] = 5.0
    stall_timeout: Annotated[Seconds, Gt(0)] = 30.0
    fence_timeout: Annotated[Seconds, Interval(gt=0, le=60)] = 5.0
    spin: Annotated[Microseconds, Interval(ge=0, le=10_000)] = 50.0
    keep_gil: Annotated[Size, Interval(ge=0, le=64 * MIB)] = 8 * MIB
    receiver_spin: Annotated[Microseconds, Interval(ge=0, le=100_000)] = 200.0
    socket_buffer: Annotated[Size, Interval(ge=0, le=1024 * MIB)] = 0
