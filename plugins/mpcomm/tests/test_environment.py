"""The library's tuning: from YAML or the environment, checked, and one for a process."""

from __future__ import annotations

from typing import Any

import pytest

from tent_core import models, section
from tent_core.errors import ConfigError, TransportUnavailable
from tent_mpcomm.environment import VARIABLES, Environment, settle
from tent_mpcomm.settings import Settings, Tuning

EVERYTHING = {
    "gid_index": (-1, "-1"),
    "nic_filter": (("mlx5_0", "mlx5_1"), "mlx5_0,mlx5_1"),
    "max_transfer_size": ("1MiB", "1048576"),
    "qps_per_connection": (4, "4"),
    "poll_batch_size": (32, "32"),
    "max_idle_spins": (0, "0"),
    "max_send_wr": (128, "128"),
    "max_outstanding_per_qp": (64, "64"),
    "log_level": ("debug", "debug"),
    "transfer_stats_interval": (100, "100"),
}


def test_every_variable_has_a_setting_and_every_field_a_variable() -> None:
    assert set(EVERYTHING) == set(VARIABLES) == set(section.keys(Tuning))
    settings = models.make(Settings, **{name: value for name, (value, _) in EVERYTHING.items()})
    _, values = settle(settings, {})
    assert values == {VARIABLES[name]: text for name, (_, text) in EVERYTHING.items()}


def test_without_settings_and_variables_the_library_keeps_its_defaults() -> None:
    settled, values = settle(Settings(), {"PATH": "/bin", "MPCOMM_OF_A_LATER_VERSION": "?"})
    assert (settled, values) == (Settings(), {})


def test_yaml_goes_before_the_environment_and_the_environment_before_defaults() -> None:
    environ = {
        "MPCOMM_GID_INDEX": "5",
        "MPCOMM_MAX_SEND_WR": "100",
        "MPCOMM_TCP_PORT": "1111",
        "MPCOMM_REMOTE_TCP_PORT": "2222",
    }
    settled, values = settle(Settings(gid_index=7, remote_port=3333), environ)
    assert (settled.gid_index, settled.max_send_wr) == (7, 100)
    assert (settled.listen_port, settled.remote_port) == (1111, 3333)
    assert values == {"MPCOMM_GID_INDEX": "7", "MPCOMM_MAX_SEND_WR": "100"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MPCOMM_TCP_PORT", "0"),
        ("MPCOMM_TCP_PORT", "http"),
        ("MPCOMM_REMOTE_TCP_PORT", "65536"),
        ("MPCOMM_GID_INDEX", "-2"),
        ("MPCOMM_GID_INDEX", ""),
        ("MPCOMM_NIC_FILTER", ""),
        ("MPCOMM_NIC_FILTER", "mlx5_0,,mlx5_1"),
        ("MPCOMM_MAX_RDMA_TRANSFER_SIZE", "1GiB"),
        ("MPCOMM_MAX_RDMA_TRANSFER_SIZE", "0"),
        ("MPCOMM_QPS_PER_CONNECTION", "17"),
        ("MPCOMM_QPS_PER_CONNECTION", "1.5"),
        ("MPCOMM_LOG_LEVEL", "loud"),
        ("MPCOMM_MAX_IDLE_SPINS", "0x10"),
    ],
)
def test_a_variable_that_is_wrong_fails_the_start_although_yaml_goes_before_it(
    variable: str, value: str
) -> None:
    with pytest.raises(TransportUnavailable, match=f"{variable}='{value}'"):
        settle(Settings(gid_index=1, qps_per_connection=1), {variable: value})


def test_all_mistakes_are_in_one_error() -> None:
    with pytest.raises(TransportUnavailable, match=r"MPCOMM_GID_INDEX.*MPCOMM_LOG_LEVEL"):
        settle(Settings(), {"MPCOMM_LOG_LEVEL": "x", "MPCOMM_GID_INDEX": "y"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"qps_per_connection": 0},
        {"qps_per_connection": 17},
        {"gid_index": -2},
        {"nic_filter": []},
        {"nic_filter": ["a,b"]},
        {"log_level": "trace"},
        {"listen_port": 0},
        {"advertise_host": "::1"},
        {"advertise_host": "0.0.0.0"},
        {"advertise_port": 65536},
        {"devices": ["mlx5_0"]},
    ],
)
def test_yaml_that_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        models.make(Settings, **wrong)


# ---------------------------------------------------------------- the process


def test_the_library_finds_the_variables_while_it_is_made_and_the_process_its_own_afterwards() -> (
    None
):
    environ = {"MPCOMM_GID_INDEX": "5", "MPCOMM_MAX_SEND_WR": "1", "HOME": "/"}
    environment = Environment(environ)
    with environment.applied({"MPCOMM_GID_INDEX": "7", "MPCOMM_LOG_LEVEL": "warn"}):
        assert environ == {"MPCOMM_GID_INDEX": "7", "MPCOMM_LOG_LEVEL": "warn", "HOME": "/"}
    assert environ == {"MPCOMM_GID_INDEX": "5", "MPCOMM_MAX_SEND_WR": "1", "HOME": "/"}


def test_a_second_engine_with_other_values_is_an_error_that_names_them() -> None:
    environment = Environment({})
    give_back = environment.claim({"MPCOMM_GID_INDEX": "7"})
    same = environment.claim({"MPCOMM_GID_INDEX": "7"})
    for other, text in (
        ({"MPCOMM_GID_INDEX": "8"}, r"MPCOMM_GID_INDEX \(7, here 8\)"),
        ({}, r"\(7, here not set\)"),
    ):
        with pytest.raises(TransportUnavailable, match=text):
            environment.claim(other)
    give_back()
    with pytest.raises(TransportUnavailable):
        environment.claim({})
    same()
    environment.claim({})()
