"""What YAML may say of the transport `shm`, with the measurements behind the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Interval, Le

from tent_core.section import Section
from tent_core.units import Size

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Settings(Section):
    """Settings of the transport `shm`.

    - `copy_threads`: over how many threads a large transfer is spread, the submitting one included if it
      waits. Two halve 500 blocks of 64 KiB of registered memory, and 16 MiB; on two cores a third loses.
    - `split_bytes`: from this size on it is spread. One block of 4 MiB gains where it comes from memory
      (0.32 ms to 0.27), and loses where it comes from the cache (0.09 ms to 0.11); at 1 MiB both lose.
    - `keep_gil_bytes`: up to this size, with 4 KiB more counted for each block, the copy keeps the GIL and
      the submitting thread makes it itself: about ten microseconds (16 blocks of 4 KiB: 8; one of 124 KiB:
      2 from the cache, 9 from memory). A released GIL takes 5 ms to come back beside a thread that computes.
    - `hold_gil_bytes`: the same while other threads of the process compute, for a caller that waits: some
      milliseconds, as long as those threads keep the GIL themselves.
    - `allow_ptrace_by_anyone`: let every process of this user read and write this one's memory although
      the kernel's ptrace scope is 1 (PR_SET_PTRACER_ANY, prctl(2)); debuggers may then attach as well.
    """

    copy_threads: Annotated[int, Interval(ge=1, le=64)] = 2
    split_bytes: Annotated[Size, Ge(64 * KIB)] = 4 * MIB
    keep_gil_bytes: Annotated[Size, Le(1 * MIB)] = 128 * KIB
    hold_gil_bytes: Annotated[Size, Le(1024 * MIB)] = 64 * MIB
    allow_ptrace_by_anyone: bool = False
