"""What YAML may say of the transport `mock`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tent_core.section import Section
from tent_mock.script import Step


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """`move` false reports success without moving a byte, and then peers need not be in this process.

    `clock: manual` lets delays end only by `Controller.advance`. `handshake` makes each connection do one
    bootstrap call, which the other side counts. With `bind` prepared requests are bound, as long as there is
    no script.
    """

    move: bool = True
    seed: int = 0
    clock: Literal["real", "manual"] = "real"
    handshake: bool = False
    bind: bool = False
    script: tuple[Step, ...] = ()
