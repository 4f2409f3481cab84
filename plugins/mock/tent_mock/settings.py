"""What YAML may say of the transport `mock`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tent_mock.script import Step


class Settings(BaseModel):
    """`move` false reports success without moving a byte, and then peers need not be in this process.

    `clock: manual` lets delays end only by `Controller.advance`. `handshake` makes each connection do one
    bootstrap call, which the other side counts. With `bind` prepared requests are bound, as long as there is
    no script.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    move: bool = True
    seed: int = 0
    clock: Literal["real", "manual"] = "real"
    handshake: bool = False
    bind: bool = False
    script: tuple[Step, ...] = ()
