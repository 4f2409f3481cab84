"""Each transport with a fault fails the shared suite, in the test that is there for it, by its name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BOUND_S = 150
SUITES = Path(__file__).with_name("suites.py")

ARRIVES = "test_a_write_of_any_size_arrives_and_touches_nothing_else"
PERMITS = "test_the_owner_refuses_what_its_permission_does_not_allow"
COMES_AND_GOES = "test_peers_that_come_and_go_leave_nothing_of_themselves"

FAULTS = {
    "AcknowledgesBeforeWriting": (ARRIVES, "it was acknowledged before its bytes were there"),
    "BoundCallDoesNothing": (
        "test_a_bound_call_carries_out_all_of_its_request",
        "a bound WRITE: .* although the transfer was reported as completed",
    ),
    "BoundCallIgnoresPermission": (
        PERMITS,
        "in a bound call, the owner's side ignores the permission GLOBAL_READ_ONLY",
    ),
    "ClaimsNotifications": (
        "test_notifications_that_it_carries_arrive_once_in_order_and_whole",
        "mock carries all notifications",
    ),
    "ClaimsProgress": (
        "test_progress_grows_with_the_bytes_if_that_is_claimed",
        "claims partial progress, and says that 0 of 32768 bytes have moved when all have",
    ),
    "CompletesTwice": (
        "test_a_prepared_transfer_moves_the_bytes_of_the_moment_each_time",
        r"mock reported \d+ requests twice",
    ),
    "CompletesTwiceInABatch": (
        "test_a_completed_request_has_moved_all_of_it",
        "1 requests were reported twice",
    ),
    "CompletesWhatIsShort": (
        ARRIVES,
        r"bytes are wrong or did not arrive, .* although the transfer was reported as completed",
    ),
    "ForgetsWorkWhenItCloses": (
        "test_whatever_is_under_way_is_reported_when_the_endpoint_closes",
        "these are still unreported",
    ),
    "HangsOnDeparture": (
        "test_transfers_to_an_engine_that_closed_fail_with_a_cause",
        r"a departed peer is let go of \(Endpoint.close",
    ),
    "IgnoresGenerations": (
        "test_the_owner_refuses_a_generation_that_has_gone",
        "the owner's side takes an id for a buffer, whatever its generation",
    ),
    "IgnoresPermission": (PERMITS, "the owner's side ignores the permission GLOBAL_READ_ONLY"),
    "IgnoresRanges": (
        "test_the_owner_refuses_a_range_that_leaves_its_buffer",
        "the owner's side does not check ranges",
    ),
    "KeepsAThreadPerPeer": (
        "test_threads_and_processes_do_not_grow_with_peers",
        "8 threads more with 4 peers more: .*serves-one-peer",
    ),
    "LeaksADescriptor": (COMES_AND_GOES, r"still held: descriptors: /dev/null \(\d+ times\)"),
    "MixesUpRows": (
        "test_one_batch_spans_many_buffers_of_either_side",
        r"a batch over many buffers: \d+ bytes are wrong",
    ),
    "NeedsAStart": (
        "test_stopping_is_allowed_twice_and_before_any_start",
        "has not been started",
    ),
    "NeverReports": ("test_a_completed_request_has_moved_all_of_it", "these are still unreported"),
    "SwallowsErrors": (
        PERMITS,
        "an error was swallowed: what the owner refused was reported as COMPLETED",
    ),
    "WritesOnAfterRemoval": (
        "test_no_byte_changes_once_unregister_has_returned_although_a_peer_goes_on_writing",
        "after `unregister` had returned: .* bytes changed",
    ),
    "WritesPastTheEnd": (ARRIVES, "written past the end of what was asked for"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the suite said of each, by its name; "" where it found nothing. One process runs them all."""
    results = tmp_path_factory.mktemp("faults") / "results.xml"
    nodes = [f"{SUITES}::Test{name}::{test}" for name, (test, _) in FAULTS.items()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--junitxml={results}", f"--rootdir={SUITES.parents[2]}", *nodes]
    ran = subprocess.run(
        command,
        cwd=SUITES.parents[2],
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    said: dict[str, str] = dict.fromkeys(FAULTS, "")
    assert results.exists(), ran.stdout + ran.stderr
    for case in ElementTree.parse(results).iter("testcase"):
        name = case.attrib["classname"].rpartition(".Test")[2]
        for failure in case:
            lines = (failure.text or "").splitlines()  # its report: the source is there as well
            said[name] += "".join(f"{line}\n" for line in lines if line.startswith("E "))
    return said


@pytest.mark.timeout(BOUND_S + 30)
@pytest.mark.parametrize("name", FAULTS)
def test_a_transport_with_a_fault_is_found_out_and_the_fault_is_named(
    found: dict[str, str], name: str
) -> None:
    assert found[name], "the suite has found nothing"
    assert re.search(FAULTS[name][1], found[name], re.DOTALL), found[name]


def test_no_fault_is_left_out() -> None:
    source = SUITES.with_name("broken.py").read_text()
    assert sorted(re.findall(r"^class (\w+)\(Broken\)", source, re.MULTILINE)) == sorted(FAULTS)
