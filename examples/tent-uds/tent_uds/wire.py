"""What travels on a stream. Each side is of this version: the attribute that a peer publishes says so."""

from __future__ import annotations

import struct

PIECE = 256 << 10
"""Bytes of a request that travel in one frame, and are checked and copied at once by the owner's side."""

ATTRIBUTE = struct.Struct("!16s16sQ")
"""Secret, what the socket's name is made of, network namespace. Published with the segment, and so known to
those who may connect."""

HELLO = struct.Struct("!16s16s")
"""The first of a stream: the secret, and the incarnation of the initiator."""

FRAME = struct.Struct("!BiQQI")
"""Opcode, buffer id, generation, address, length. The bytes of a WRITE follow."""

ANSWER = struct.Struct("!BI")
"""Whether it was refused, and the length of what follows: the bytes of a READ, or the reason."""

Frame = tuple[int, int, int, int, int]
