"""Asking a running engine on this machine what it knows of itself and its peers. Needs no engine here."""

from __future__ import annotations

import json
from typing import Any

from tent_core import address
from tent_core.control import tent_pb2 as pb
from tent_core.control.contract import INSPECT_LIMIT
from tent_core.control.follow import said
from tent_core.control.loop import refuse_in_forked_child
from tent_core.control.options import grpc, target
from tent_core.errors import PermissionDenied, TentError, TransportError, UnknownSegment

_FRAMING = 64
"""Bytes of a message beside its document."""


def inspect(name: str, timeout: float) -> dict[str, Any]:
    """What the engine at `name` tells: `engine`, `incarnation`, `pid`, `uptime_s`, `stats`, `peers`, ....

    Waits up to `timeout` seconds. Raises AddressError, UnknownSegment when nobody answers, PermissionDenied
    when the engine is on another machine, TransportError when it does not tell.
    """
    refuse_in_forked_child()
    options = [
        ("grpc.max_receive_message_length", INSPECT_LIMIT + _FRAMING),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(target(address.parse(name)), options=options) as channel:
        call = channel.unary_unary(
            "/tent.v1.Control/Inspect",
            pb.InspectRequest.SerializeToString,
            pb.InspectResponse.FromString,
        )
        try:
            response: pb.InspectResponse = call(pb.InspectRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise _failure(name, error, timeout) from None
    try:
        found = json.loads(response.document)
    except ValueError as error:
        raise TransportError(f"what the engine at {name} told is no document: {error}") from None
    if not isinstance(found, dict):
        raise TransportError(f"what the engine at {name} told is no document: {found!r}")
    return found


def _failure(name: str, error: Any, timeout: float) -> TentError:
    code = error.code()
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return PermissionDenied(f"the engine at {name} does not tell: {error.details()}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransportError(f"the engine at {name} did not tell within {timeout:.3g} s")
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnknownSegment(f"no engine answers at {name}: {said(error)}; is it running there?")
    return TransportError(f"what answers at {name} does not tell: {said(error)}")
