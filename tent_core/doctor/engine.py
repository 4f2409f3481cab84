"""Starts an engine as an application would, and tells what it advertises and which transports run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tent_core import address
from tent_core.doctor.finding import Finding, Level
from tent_core.errors import TentError

_TOPIC = "engine"


def engine(config: Mapping[str, Any]) -> list[Finding]:
    """Findings about an engine with this configuration; it is closed again before this returns."""
    from tent_core.engine import Engine

    try:
        with Engine(config) as running:
            chosen = running.explain()
            return [
                _advertised(running.segment_name),
                *(Finding(_TOPIC, f"transport {n}", Level.OK, "runs") for n in chosen.candidates),
                *(
                    Finding(_TOPIC, f"transport {p.name}", Level.INFO, f"is not used: {p.reason}")
                    for p in chosen.passed_over
                ),
                *_none(chosen.candidates),
            ]
    except TentError as error:
        return [Finding(_TOPIC, "start", Level.BAD, str(error), "see above")]


def _advertised(name: str) -> Finding:
    if address.is_loopback(address.parse(name).host):
        return Finding(
            _TOPIC,
            "advertises",
            Level.INFO,
            f"{name}: only processes on this host can open it",
            "for other hosts give --listen, or control.listen in YAML, with an address below",
        )
    return Finding(_TOPIC, "advertises", Level.OK, name)


def _none(candidates: tuple[str, ...]) -> list[Finding]:
    if candidates:
        return []
    return [
        Finding(
            _TOPIC,
            "transports",
            Level.BAD,
            "none can carry host memory between processes of this machine",
            "pip install tent-shm tent-tcp, and see the reasons above and in `tent plugins`",
        )
    ]
