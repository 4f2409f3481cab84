"""Looking whether an engine answers at an address, for less than a call costs."""

from __future__ import annotations

import asyncio

from tent_core.address import Address

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES = 9
_SETTINGS = 4  # RFC 9113: a server's first frame


async def answers(where: Address, within: float) -> bool:
    """Whether what listens at `where` speaks HTTP/2, as control ports do, within so many seconds.

    A connection alone says little: the kernel accepts it for a process that is stopped.
    """
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(where.host, where.port)
            try:
                writer.write(_HELLO)
                frame = await reader.readexactly(_FRAME_BYTES)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, EOFError):
        return False
    return frame[3] == _SETTINGS


async def is_refused(where: Address, within: float) -> bool:
    """Whether nobody listens at `where`: the machine is there, and says so."""
    try:
        async with asyncio.timeout(within):
            _, writer = await asyncio.open_connection(where.host, where.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
