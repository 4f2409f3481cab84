"""The methods of the service as gRPC calls them: what cannot be parsed, or is refused, changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from tent_core.control import tent_pb2 as pb
from tent_core.control.options import grpc
from tent_core.control.wire import WireError

SERVICE = "tent.v1.Control"
Method = Callable[[Any, Any], Awaitable[Any]]
"""Takes a request (or an iterator of them) and gRPC's context."""


class Refused(Exception):
    """A call that is answered with a status and a text of its own."""

    def __init__(self, code: Any, text: str) -> None:
        self.code = code
        super().__init__(text)


class Malformed:
    """Stands for a message whose bytes could not be parsed."""

    def __init__(self, text: str) -> None:
        self.text = text


class Service(Protocol):
    """Who answers; each method raises Refused and WireError."""

    async def connect(self, request: Any, context: Any, /) -> Any: ...
    async def watch(self, request: Any, context: Any, /) -> Any: ...
    async def get_segment(self, request: Any, context: Any, /) -> Any: ...
    async def bootstrap(self, request: Any, context: Any, /) -> Any: ...
    async def notify(self, request: Any, context: Any, /) -> Any: ...
    async def goodbye(self, request: Any, context: Any, /) -> Any: ...
    async def inspect(self, request: Any, context: Any, /) -> Any: ...


def handlers(service: Service, log: Any) -> Any:
    """The handlers, as generated code would make them, but for bytes that cannot be parsed."""
    one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    both = grpc.stream_stream_rpc_method_handler

    def handler(make: Any, method: Method, request: type[Message], response: type[Message]) -> Any:
        return make(_checked(method, log), _tolerant(request), response.SerializeToString)

    methods = {
        "Connect": handler(one, service.connect, pb.ConnectRequest, pb.ConnectResponse),
        "Watch": handler(both, service.watch, pb.WatchRequest, pb.WatchResponse),
        "GetSegment": handler(
            many, service.get_segment, pb.GetSegmentRequest, pb.GetSegmentResponse
        ),
        "Bootstrap": handler(one, service.bootstrap, pb.BootstrapRequest, pb.BootstrapResponse),
        "Notify": handler(one, service.notify, pb.NotifyRequest, pb.NotifyResponse),
        "Goodbye": handler(one, service.goodbye, pb.GoodbyeRequest, pb.GoodbyeResponse),
        "Inspect": handler(one, service.inspect, pb.InspectRequest, pb.InspectResponse),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _checked(method: Method, log: Any) -> Method:
    """Answer INVALID_ARGUMENT to what is malformed, and change nothing because of it."""

    async def call(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, Malformed):
                raise WireError(request.text)
            return await method(request, context)
        except Refused as refused:
            code, text = refused.code, str(refused)
        except WireError as error:
            code, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except Exception as error:
            name = getattr(method, "__name__", repr(method))
            log.error("control_call_failed", call=name, exc_info=error)
            code, text = grpc.StatusCode.INTERNAL, "an error of the engine, which its log shows"
        await context.abort(code, text)

    return call


def _tolerant(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    # A deserializer that raises makes gRPC log a stack trace and answer UNKNOWN.
    def read(data: bytes) -> Message | Malformed:
        try:
            return kind.FromString(data)
        except (DecodeError, UnicodeDecodeError) as error:  # the latter: protobuf's pure Python
            return Malformed(f"bytes that are no {kind.DESCRIPTOR.name}: {error}")

    return read
