"""What holds for all tests of the core and the plugins: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ("tent_core.testing.report",)

settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("patient")
