"""The receiving side: a process of its own, whose interpreter no thread of the application can delay.

It imports numpy and nothing of the core, so that it stays small. `loop` is its event loop, `connection` what
it does with one accepted stream, `registry` what peers may touch, `payload` how bytes reach that memory,
`owner` the engine whose memory it is, and `orders` how that engine talks to it.
"""
