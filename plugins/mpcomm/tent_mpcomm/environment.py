"""The library's tuning: YAML before the environment, both checked, one set of values for a whole process."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tent_core import section
from tent_core.errors import TransportUnavailable
from tent_mpcomm.settings import Settings

VARIABLES: Mapping[str, str] = {
    "gid_index": "MPCOMM_GID_INDEX",
    "nic_filter": "MPCOMM_NIC_FILTER",
    "max_transfer_size": "MPCOMM_MAX_RDMA_TRANSFER_SIZE",
    "qps_per_connection": "MPCOMM_QPS_PER_CONNECTION",
    "poll_batch_size": "MPCOMM_POLL_BATCH_SIZE",
    "max_idle_spins": "MPCOMM_MAX_IDLE_SPINS",
    "max_send_wr": "MPCOMM_MAX_SEND_WR",
    "max_outstanding_per_qp": "MPCOMM_MAX_OUTSTANDING_PER_QP",
    "log_level": "MPCOMM_LOG_LEVEL",
    "transfer_stats_interval": "MPCOMM_TRANSFER_STATS_INTERVAL",
}
"""The variable behind each field of `Tuning`."""

LISTEN_PORT, REMOTE_PORT = "MPCOMM_TCP_PORT", "MPCOMM_REMOTE_TCP_PORT"
"""Ports are no tuning: each engine of a process has its own."""

_NUMBER = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def settle(settings: Settings, environ: Mapping[str, str]) -> tuple[Settings, Mapping[str, str]]:
    """The settings with what only the environment says, and the values of the variables for the library.

    Raises TransportUnavailable with every mistake that is in the environment, used or not.
    """
    mistakes: list[str] = []
    found: dict[str, Any] = {}
    ports = {"listen_port": LISTEN_PORT, "remote_port": REMOTE_PORT}
    for field, variable in {**VARIABLES, **ports}.items():
        if variable in environ:
            try:
                found[field] = _checked(field, environ[variable])
            except ValueError as error:
                mistakes.append(f"{variable}={environ[variable]!r}: {error}")
    if mistakes:
        raise TransportUnavailable(
            f"MPComm's environment has mistakes: {'; '.join(mistakes)}. Mend or unset the variables"
        )
    given = {field: value for field, value in found.items() if getattr(settings, field) is None}
    settled = replace(settings, **given)
    values = {
        variable: _text(value)
        for field, variable in VARIABLES.items()
        if (value := getattr(settled, field)) is not None
    }
    return settled, values


def _checked(field: str, text: str) -> Any:
    """The value of a variable. The library does not know units, so they are no numbers here either."""
    value: Any = text
    if field == "nic_filter":
        value = text.split(",")
    elif field != "log_level":
        if not _NUMBER.fullmatch(text):
            raise ValueError("expected a whole number")
        value = int(text)
    made, complaints = section.read(Settings, {field: value})
    if made is None:
        raise ValueError(f"expected {'; '.join(each.allowed for each in complaints)}")
    return getattr(made, field)


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


class Environment:
    """The variables of a process, which belong to all engines in it: they must agree while any runs.

    Thread-safe; the lock is a leaf, but for the construction of an instance in `applied`.
    """

    def __init__(self, environ: Any = os.environ) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._values: Mapping[str, str] = {}
        self._users = 0

    def claim(self, values: Mapping[str, str]) -> Callable[[], None]:
        """Have these values in force until what this answers is called, once.

        Raises TransportUnavailable when another engine of the process runs with other values.
        """
        with self._lock:
            if self._users and self._values != values:
                differ = sorted(
                    variable
                    for variable in {*self._values, *values}
                    if self._values.get(variable) != values.get(variable)
                )
                raise TransportUnavailable(
                    "another engine of this process runs MPComm with other values of "
                    + ", ".join(
                        f"{v} ({self._values.get(v, 'not set')}, here {values.get(v, 'not set')})"
                        for v in differ
                    )
                    + "; they belong to the process: give both engines the same ones"
                )
            self._values = dict(values)
            self._users += 1
        return self._give_back

    def _give_back(self) -> None:
        with self._lock:
            self._users -= 1

    @contextmanager
    def applied(self, values: Mapping[str, str]) -> Iterator[None]:
        """The variables as the library is to find them while it is constructed."""
        with self._lock:
            before = {name: self._environ.get(name) for name in VARIABLES.values()}
            self._set({name: values.get(name) for name in before})
            try:
                yield
            finally:
                self._set(before)

    def _set(self, values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                self._environ.pop(name, None)
            else:
                self._environ[name] = value


OF_THIS_PROCESS = Environment()
