"""What YAML may say of the transport `shm`, with the measurements behind the defaults."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tent_core.units import Size

KIB, MIB = 1 << 10, 1 << 20


class Settings(BaseModel):
    """Settings of the transport `shm`. The sizes are weights: bytes, and 4 KiB more for each block.

    - `copy_threads`: over how many threads a large transfer is spread, the submitting one included.
    - `split_bytes`: from this weight on it is spread.
    - `keep_gil_bytes`: up to this weight the call keeps the GIL, and the submitting thread makes it itself.
    - `allow_ptrace_by_anyone`: let every process of this user read and write this one's memory although
      the kernel's ptrace scope is 1 (PR_SET_PTRACER_ANY, prctl(2)); debuggers may then attach as well.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    copy_threads: Annotated[int, Field(ge=1, le=64)] = 2
    split_bytes: Annotated[Size, Field(ge=64 * KIB)] = 4 * MIB
    keep_gil_bytes: Annotated[Size, Field(le=1 * MIB)] = 128 * KIB
    allow_ptrace_by_anyone: bool = False
