"""Openers that fall silent, as one does whose process is stopped, at any byte of what they say or hear."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable

import pytest
from control_harness import HANG_S, Peers, Side, buffer, side, wait_until

from tent_core import host
from tent_core.control import tent_pb2 as pb
from tent_core.control import wire
from tent_core.control.contract import PROTOCOL
from tent_core.control.options import aio
from tent_core.control.tent_pb2_grpc import ControlStub

SAYS = range(0, 1100, 20)
"""So many bytes of what the opener says arrive; all that it says are about 1060."""

HEARS = range(0, 960, 20)
"""So many bytes of what is said to it arrive; all of it are about 920."""


class Opener:
    """Opens a session, on a connection that carries so many bytes each way, and then nothing, but stays."""

    def __init__(self, it: Side, number: int, says: int, hears: int) -> None:
        self._it = it
        self._number = number
        self._left = {"says": says, "hears": hears}
        self._silent = asyncio.Event()
        self._relays: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def run(self, everybody_silent: asyncio.Barrier, seen: asyncio.Event) -> None:
        """Fall silent; when all others are as well, stay so until what becomes of them has been `seen`."""
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            # A subchannel of its own, as engines have; it pings nobody.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
            async with aio.insecure_channel(f"ipv4:127.0.0.1:{port}", options=options) as channel:
                speaks = asyncio.create_task(self._speak(ControlStub(channel)))
                # With nothing more to say, or because a slow one was given up while it spoke.
                speaks.add_done_callback(lambda _: self._silent.set())
                try:
                    await asyncio.wait_for(self._silent.wait(), HANG_S)
                    await everybody_silent.wait()
                    await seen.wait()
                finally:
                    for task in (speaks, *self._relays):
                        task.cancel()
                    await asyncio.gather(speaks, *self._relays, return_exceptions=True)
            for writer in self._writers:
                writer.close()

    async def _speak(self, stub: ControlStub) -> None:
        """Everything that an opener says, one after the other."""
        name = f"127.0.0.1:{self._number}"
        connect = pb.ConnectRequest(
            protocol=PROTOCOL,
            target=self._it.name,
            name=name,
            incarnation=secrets.token_bytes(16),
            host=wire.host_to(host.identify()),
            nonce=self._number,
        )
        session = (await stub.Connect(connect)).accepted.session
        watch = stub.Watch()
        await watch.write(pb.WatchRequest(session=session, hello=pb.WatchRequest.Hello()))
        while not (message := await watch.read()).HasField("fragment"):
            pass
        version = message.fragment.version
        await watch.write(pb.WatchRequest(session=session, acknowledged=version))
        await stub.Bootstrap(pb.BootstrapRequest(session=session, transport="mock", payload=b"hi"))
        note = pb.Notification(sequence=1, name="hi")
        await stub.Notify(pb.NotifyRequest(session=session, notifications=[note]))
        await stub.GetSegment(pb.GetSegmentRequest(session=session)).read()

    async def _accept(self, ours: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        bound = self._it.plane._bound
        assert bound is not None
        theirs, forth = await asyncio.open_connection(*bound)
        self._writers += back, forth
        for way, source, sink in (("says", ours, forth), ("hears", theirs, back)):
            self._relays.append(asyncio.create_task(self._relay(way, source, sink)))

    async def _relay(
        self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        while self._left[way] and not self._silent.is_set():
            piece = (await source.read(1 << 16))[: self._left[way]]
            if not piece or self._silent.is_set():
                break
            self._left[way] -= len(piece)
            sink.write(piece)
        self._silent.set()


async def _all_silent(openers: Iterable[Opener], seen: asyncio.Event, ready: asyncio.Event) -> None:
    openers = list(openers)
    barrier = asyncio.Barrier(len(openers) + 1)
    async with asyncio.TaskGroup() as group:
        for opener in openers:
            group.create_task(opener.run(barrier, seen))
        await barrier.wait()
        ready.set()


@pytest.mark.parametrize("way", ["says", "hears"])
def test_an_opener_that_falls_silent_at_any_byte_departs_and_leaves_nothing(way: str) -> None:
    with side(peers=Peers(grace_s=0.2, max=1000)) as it:
        it.publish(buffer(1))
        loop = it.plane._loop
        seen, ready = asyncio.Event(), asyncio.Event()
        everything = 1 << 30
        openers = [
            Opener(it, 1 + i, *((n, everything) if way == "says" else (everything, n)))
            for i, n in enumerate(SAYS if way == "says" else HEARS)
        ]
        silent = loop.begin(_all_silent(openers, seen, ready))
        try:
            wait_until(ready.is_set, HANG_S, "all to fall silent")
            assert len(it.handler.opened) > len(openers) / 4
            wait_until(
                lambda: (
                    len(it.handler.departed) == len(it.handler.opened)
                    and not it.plane._server._streams
                ),
                HANG_S,
                "all to depart",
            )
        finally:
            loop.call(seen.set)
            with contextlib.suppress(BaseExceptionGroup):
                silent.result(HANG_S)
        assert {
            "did not come back within 0.2 s" in reason for _, reason in it.handler.departed
        } == {True}
