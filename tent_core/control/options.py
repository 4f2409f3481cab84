"""gRPC as this project uses it: imported without its own log on stderr, with the options of both sides."""

from __future__ import annotations

import os
import sys
from typing import Any

from tent_core import address
from tent_core.address import Address
from tent_core.control.contract import ControlSettings

# The C core reads these once. Unless told otherwise it writes what it thinks of lost connections to stderr,
# and restarts threads of its own in forked children, where they crash (with 1.85 in a quarter of all forks).
# An application that has imported grpc, or says itself what it wants, keeps what it has.
_WHILE_LOADING = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}

if "grpc" in sys.modules:
    import grpc
else:
    _added = {name: value for name, value in _WHILE_LOADING.items() if name not in os.environ}
    os.environ.update(_added)
    try:
        import grpc

        # Some versions read at import, others when the core is first used, as by this unused channel.
        grpc.insecure_channel("ipv4:127.0.0.1:1").close()
    finally:
        for _name in _added:
            os.environ.pop(_name, None)

aio: Any = grpc.aio
"""grpc.aio, untyped: no published stubs know all of it."""

Options = list[tuple[str, int]]

__all__ = ["Options", "aio", "client_options", "grpc", "server_options", "target"]

_LEAST_PING_INTERVAL_MS = 10
"""A peer may ping as often as its own settings say; the default of 5 minutes ends idle streams."""

_HANDSHAKE_S = 10
"""A connection that says nothing costs a descriptor: the default would keep it for two minutes."""


def target(where: Address) -> str:
    """`where` as gRPC names it; IP addresses are not asked of the name service."""
    if address.is_v6(where.host):
        return f"ipv6:{str(where).replace('%', '%25')}"  # RFC 6874: a zone in a URI
    return f"ipv4:{where}" if where.host.replace(".", "").isdigit() else f"dns:///{where}"


def client_options(settings: ControlSettings) -> Options:
    """Options of a channel to a peer."""
    return [
        *_keepalive(settings),
        ("grpc.initial_reconnect_backoff_ms", _ms(min(0.1, settings.reconnect_max_s))),
        # The name misleads: it bounds one attempt to connect, and by default one lost SYN costs 20 s.
        ("grpc.min_reconnect_backoff_ms", _ms(settings.reconnect_max_s)),
        ("grpc.max_reconnect_backoff_ms", _ms(settings.reconnect_max_s)),
        # Engines of one process would share a connection, and one end of it would be the end of all.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def server_options(settings: ControlSettings) -> Options:
    """Options of the server of an engine."""
    return [
        *_keepalive(settings),
        # On by default, and then a port that is taken is silently shared.
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
    ]


def _keepalive(settings: ControlSettings) -> Options:
    timeout = _ms(settings.keepalive_timeout_s)
    return [
        ("grpc.keepalive_time_ms", _ms(settings.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", timeout),
        # Newer cores take this one, of 60 s by default, instead of the one before.
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
