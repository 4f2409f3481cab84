"""The mock transport against the contract, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

import tent_mock
from tent_core.descriptor import PeerKey
from tent_core.errors import TransportError, TransportUnavailable, Unreachable
from tent_core.testing.harness import DirectPeer, Row, Side, Submitted
from tent_core.testing.waiting import wait_until
from tent_core.transport import EXCHANGE_LIMIT, Endpoint, LocalBuffer
from tent_core.types import Opcode, Permission, Status

KIB = 1024


class Pair:
    """Two sides, a buffer of random bytes here, an empty one there, and an endpoint between them."""

    def __init__(self, here: Side, there: Side) -> None:
        self.here, self.there = here, there
        self.source = np.random.default_rng(7).integers(0, 256, 64 * KIB, np.uint8)
        self.target = np.zeros(64 * KIB, np.uint8)
        self.local = here.register(self.source)
        self.remote = there.register(self.target)
        self.control = tent_mock.controller(here)
        self.endpoint: Endpoint = here.connect(there)

    def rows(self, count: int, length: int = KIB) -> list[Row]:
        return [(self.local, i * length, self.remote, i * length, length) for i in range(count)]

    def write(self, count: int = 8) -> Submitted:
        return Submitted(self.endpoint, Opcode.WRITE, self.rows(count))

    def arrived(self, count: int = 8) -> list[bool]:
        """Which of the requests of `write` have their bytes at the other side."""
        ranges = [slice(i * KIB, (i + 1) * KIB) for i in range(count)]
        return [bool(np.array_equal(self.source[r], self.target[r])) for r in ranges]


def statuses(submitted: Submitted) -> list[Status]:
    return [Status(s) for s in submitted.work.status]


def make(**settings: object) -> Pair:
    return Pair(Side(tent_mock.declare(), **settings).start(), Side(tent_mock.declare()).start())


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = make(clock="manual")
    yield pair
    pair.here.transport.stop()
    pair.there.transport.stop()


DONE, FAILED, PENDING, REFUSED = Status.COMPLETED, Status.FAILED, Status.PENDING, Status.INITIAL


def test_without_a_script_every_byte_arrives_before_submit_returns(pair: Pair) -> None:
    before = pair.source.copy()
    written = pair.write()
    assert statuses(written) == [DONE] * 8
    assert written.finished == 1
    assert pair.arrived() == [True] * 8
    assert np.array_equal(pair.source, before)
    assert not pair.target[8 * KIB :].any()


def test_a_read_brings_the_bytes_of_the_other_side(pair: Pair) -> None:
    pair.target[:] = np.arange(64 * KIB).astype(np.uint8)
    read = Submitted(pair.endpoint, Opcode.READ, [(pair.local, 5, pair.remote, 300, 1000)])
    assert statuses(read) == [DONE]
    assert np.array_equal(pair.source[5:1005], np.arange(300, 1300).astype(np.uint8))
    assert np.array_equal(pair.target, np.arange(64 * KIB).astype(np.uint8))


def test_the_nth_request_alone_is_refused_at_submit(pair: Pair) -> None:
    pair.control.plan("refuse", at=3)
    written = pair.write()
    assert statuses(written) == [DONE, DONE, REFUSED, *[DONE] * 5]
    assert pair.arrived() == [True, True, False, *[True] * 5]
    assert "refuse" in str(written.work.cause_of(2))
    assert statuses(pair.write()) == [DONE] * 8


def test_a_step_without_at_acts_until_the_script_is_cleared(pair: Pair) -> None:
    pair.control.plan("fail")
    assert statuses(pair.write(2)) == [FAILED] * 2
    assert statuses(pair.write(2)) == [FAILED] * 2
    pair.control.clear()
    assert statuses(pair.write(2)) == [DONE] * 2


def test_every_other_request_fails_three_times(pair: Pair) -> None:
    pair.control.plan("fail", at=2, every=2, times=3)
    assert statuses(pair.write(8)) == [DONE, FAILED] * 3 + [DONE] * 2


def test_a_step_counts_only_the_requests_that_it_matches(pair: Pair) -> None:
    pair.control.plan("fail", at=2, opcode="read")
    pair.control.plan("refuse", at=1, peer="somebody else")
    assert statuses(pair.write(4)) == [DONE] * 4
    read = Submitted(pair.endpoint, Opcode.READ, pair.rows(3))
    assert statuses(read) == [DONE, FAILED, DONE]


def test_a_delayed_request_completes_when_its_time_has_come_and_not_before(pair: Pair) -> None:
    pair.control.plan("delay", at=2, seconds="10ms")
    written = pair.write(3)
    assert statuses(written) == [DONE, PENDING, DONE]
    assert pair.control.advance(0.009) == 0
    assert pair.arrived(3) == [True, False, True]
    assert pair.control.advance(0.002) == 1
    assert statuses(written) == [DONE] * 3
    assert pair.arrived(3) == [True] * 3


def test_a_delay_past_the_deadline_ends_at_the_deadline_as_a_timeout(pair: Pair) -> None:
    pair.control.plan("delay", seconds=60)
    written = Submitted(pair.endpoint, Opcode.WRITE, pair.rows(1), timeout=1.0)
    pair.control.advance(2.0)
    assert statuses(written) == [Status.TIMEOUT]
    assert pair.arrived(1) == [False]


def test_delays_in_real_time_end_by_themselves() -> None:
    pair = make(script=({"do": "delay", "seconds": 0.01},))
    try:
        assert set(pair.write().wait().status) == {DONE}
    finally:
        pair.here.transport.stop()
        pair.there.transport.stop()
    wait_until(lambda: "tent-mock-clock" not in {t.name for t in threading.enumerate()})


def test_a_request_hangs_until_it_is_released(pair: Pair) -> None:
    pair.control.plan("hang", at=1)
    pair.control.plan("hang", at=3)
    written = pair.write(4)
    pair.control.wait_held(2)
    assert statuses(written) == [PENDING, DONE, PENDING, DONE]
    assert pair.control.release(1) == 1
    assert statuses(written) == [DONE, DONE, PENDING, DONE]
    assert pair.control.release() == 1
    assert written.finished == 1
    assert pair.arrived(4) == [True] * 4


def test_a_short_request_fails_and_says_how_many_bytes_it_moved(pair: Pair) -> None:
    pair.control.plan("short", at=1)
    pair.control.plan("short", at=2, moved="100B")
    written = pair.write(2)
    assert statuses(written) == [FAILED, FAILED]
    assert written.work.moved.tolist() == [512, 100]
    assert np.array_equal(pair.source[:512], pair.target[:512])
    assert not pair.target[512:1024].any()
    assert not pair.target[1124:].any()


def test_a_second_report_changes_nothing_and_is_counted(pair: Pair) -> None:
    pair.control.plan("twice", at=2)
    written = pair.write(2)
    assert statuses(written) == [DONE, DONE]
    assert (written.work.surplus, written.finished) == (1, 1)


def test_an_unfenced_failure_can_still_write_when_its_late_bytes_are_let_go(pair: Pair) -> None:
    pair.control.plan("fail", at=1, fenced=False)
    written = pair.write(1)
    assert statuses(written) == [FAILED]
    assert written.work.unfenced
    assert pair.arrived(1) == [False]
    pair.endpoint.close("the attempt is given up")
    assert pair.control.release() == 1
    assert pair.arrived(1) == [True]


def test_late_bytes_do_not_reach_a_buffer_that_was_taken_away(pair: Pair) -> None:
    pair.control.plan("fail", fenced=False)
    pair.write(1)
    pair.there.unregister(pair.remote)
    again = pair.there.register(pair.target)
    assert again.id == pair.remote.id
    pair.control.release()
    assert not pair.target.any()


def test_losing_a_peer_tells_the_engine_with_the_cause(pair: Pair) -> None:
    peer = DirectPeer(pair.here, pair.there)
    endpoint = pair.here.transport.connect(peer)
    pair.control.plan("lose", at=1)
    lost = Submitted(endpoint, Opcode.WRITE, pair.rows(1))
    assert statuses(lost) == [FAILED]
    assert [str(s) for s in peer.suspicions] == [str(lost.work.cause_of(0))]
    assert pair.control.suspect(TransportError("gone")) == 2
    assert str(peer.suspicions[-1]) == "gone"


@pytest.mark.parametrize(("do", "error"), [("raise", TransportError), ("crash", RuntimeError)])
def test_a_submit_that_raises_has_started_nothing(
    pair: Pair, do: str, error: type[Exception]
) -> None:
    pair.control.plan(do, at=4)
    with pytest.raises(error):
        pair.write()
    assert pair.arrived() == [False] * 8


def test_the_same_seed_gives_the_same_faults_and_another_seed_others() -> None:
    def run(seed: int, batches: list[int]) -> list[Status]:
        pair = make(seed=seed, script=({"do": "fail", "chance": 0.3},))
        try:
            return [s for count in batches for s in statuses(pair.write(count))]
        finally:
            pair.here.transport.stop()
            pair.there.transport.stop()

    first = run(1, [32, 32])
    assert first == run(1, [8, 24, 16, 16])
    assert first != run(2, [32, 32])
    assert 5 < first.count(FAILED) < 40


def test_closing_an_endpoint_fails_what_is_pending_with_the_reason(pair: Pair) -> None:
    pair.control.plan("hang", at=1)
    pair.control.plan("delay", at=2, seconds=5)
    written = pair.write(2)
    assert pair.endpoint.holdings() == {"pending": 2}
    pair.endpoint.close("the peer departed")
    pair.endpoint.close("again")
    assert statuses(written) == [FAILED, FAILED]
    assert "the peer departed" in str(written.work.cause_of(0))
    assert pair.endpoint.holdings() == {"pending": 0}
    assert pair.control.release() == pair.control.advance(10) - 1 == 0
    with pytest.raises(TransportError, match="the peer departed"):
        pair.write()
    assert not pair.target.any()


def test_a_request_that_hangs_does_not_hold_up_the_removal_of_its_buffer(pair: Pair) -> None:
    pair.control.plan("hang", at=1)
    written = pair.write(1)
    pair.there.unregister(pair.remote)
    pair.control.release()
    assert statuses(written) == [FAILED]
    assert "not registered" in str(written.work.cause_of(0))
    assert not pair.target.any()


def test_the_owner_checks_permission_and_range_itself(pair: Pair) -> None:
    array = np.zeros(KIB, np.uint8)
    read_only = pair.there.register(array, permission=Permission.GLOBAL_READ_ONLY)
    private = pair.there.register(array, permission=Permission.LOCAL_READ_WRITE)

    def end(opcode: Opcode, remote: LocalBuffer, offset: int = 0) -> Status:
        rows = [(pair.local, 0, remote, offset, 512)]
        return statuses(Submitted(pair.endpoint, opcode, rows))[0]

    assert end(Opcode.READ, read_only) is DONE
    assert end(Opcode.WRITE, read_only) is FAILED
    assert end(Opcode.READ, private) is FAILED
    assert end(Opcode.READ, read_only, offset=512) is DONE
    assert end(Opcode.READ, read_only, offset=513) is FAILED
    assert end(Opcode.READ, read_only, offset=-1) is FAILED


def test_two_buffers_in_one_batch_are_told_apart(pair: Pair) -> None:
    other = np.zeros(KIB, np.uint8)
    second = pair.there.register(other)
    rows = [(pair.local, 0, pair.remote, 0, 100), (pair.local, 100, second, 0, 100)]
    assert statuses(Submitted(pair.endpoint, Opcode.WRITE, rows)) == [DONE, DONE]
    pair.there.unregister(pair.remote)
    written = Submitted(pair.endpoint, Opcode.WRITE, rows)
    assert statuses(written) == [FAILED, FAILED]
    pair.control.plan("fail", at=1)
    assert statuses(Submitted(pair.endpoint, Opcode.WRITE, rows)) == [FAILED, DONE]
    assert np.array_equal(other[:100], pair.source[100:200])


def test_an_engine_of_another_process_is_unreachable_unless_nothing_is_moved(pair: Pair) -> None:
    stranger = Side(tent_mock.declare("another", 1001)).start()
    with pytest.raises(Unreachable, match="its own process"):
        pair.here.connect(stranger)
    stranger.transport.stop()
    idle = make(move=False)
    endpoint = idle.here.connect(stranger)
    endpoint.close("done")
    assert statuses(idle.write()) == [DONE] * 8
    assert not idle.target.any()
    for side in (idle.here, idle.there):
        side.transport.stop()


def test_a_transport_that_is_told_not_to_start_says_that_it_is_unavailable() -> None:
    side = Side(tent_mock.declare(), script=({"on": "start", "do": "fail"},))
    with pytest.raises(TransportUnavailable, match="script"):
        side.start()
    side.transport.stop()
    with pytest.raises(LookupError, match="no mock transport"):
        tent_mock.controller(side)


def test_connecting_fails_hangs_or_finds_nobody_as_scripted(pair: Pair) -> None:
    pair.control.plan("unreachable", on="connect", at=1)
    pair.control.plan("fail", on="connect", at=2)
    pair.control.plan("hang", on="connect", at=3)
    with pytest.raises(Unreachable):
        pair.here.connect(pair.there)
    with pytest.raises(TransportError):
        pair.here.connect(pair.there)
    connecting = threading.Thread(target=pair.here.connect, args=[pair.there], daemon=True)
    connecting.start()
    pair.control.wait_held(1)
    assert connecting.is_alive()
    pair.control.release()
    connecting.join(5)
    assert not connecting.is_alive()
    assert pair.control.count("connect") == 4


def test_declining_a_buffer_publishes_nothing_for_it(pair: Pair) -> None:
    pair.control.plan("refuse", on="add_buffers", at=1)
    declined = pair.here.register(np.zeros(8, np.uint8))
    taken = pair.here.register(np.zeros(8, np.uint8))
    buffers = pair.here.segment.snapshot.buffers
    assert dict(buffers[declined.id].attributes) == {}
    assert set(buffers[taken.id].attributes) == {"mock"}


def test_a_handshake_is_counted_at_the_other_side() -> None:
    pair = make(handshake=True)
    there = tent_mock.controller(pair.there)
    assert there.count("bootstrap") == 1
    assert there.count("bootstrap", peer=pair.here.segment.snapshot.name) == 1
    with pytest.raises(TransportError, match="no handshake"):
        pair.there.transport.bootstrap(pair.here.segment.snapshot.key, b"hello?")
    pair.here.transport.stop()
    pair.there.transport.stop()


def test_the_calls_of_the_contract_are_remembered_in_order(pair: Pair) -> None:
    pair.write(3)
    old = pair.there.segment.snapshot
    pair.endpoint.refresh(old, old)
    pair.endpoint.close("done")
    pair.here.transport.release(old.key, "departed")
    pair.here.unregister(pair.local)
    pair.here.transport.stop()
    assert [call.on for call in pair.control.calls] == [
        "start",
        "add_buffers",
        "connect",
        "request",
        "refresh",
        "close",
        "release",
        "remove_buffer",
        "stop",
    ]
    assert pair.control.calls[3] == (tent_mock.On.REQUEST, old.name, "write 3")


def test_stopping_withdraws_the_attribute_and_ends_what_hangs(pair: Pair) -> None:
    pair.control.plan("hang", at=1)
    written = pair.write(1)
    assert "mock" in pair.here.segment.snapshot.attributes
    pair.here.transport.stop()
    pair.here.transport.stop()
    assert statuses(written) == [FAILED]
    assert "mock" not in pair.here.segment.snapshot.attributes
    pair.there.transport.stop()
    with pytest.raises(Unreachable):
        make().here.connect(pair.there)


def test_several_mocks_stand_beside_each_other_on_one_time() -> None:
    clock = tent_mock.ManualClock()
    a = Side(tent_mock.declare("a", 1001, clock=clock), script=({"do": "delay", "seconds": 1},))
    b = Side(tent_mock.declare("b", 1002, clock=clock))
    with a, b:
        assert tent_mock.controller(a, "a").clock is tent_mock.controller(b, "b").clock
        assert tent_mock.controller(a, "a").advance(1) == 0


def test_a_clock_that_runs_by_itself_cannot_be_advanced() -> None:
    pair = make()
    with pytest.raises(TypeError, match="clock: manual"):
        pair.control.advance(1)
    pair.here.transport.stop()
    pair.there.transport.stop()


def test_capabilities_are_what_a_declaration_claims() -> None:
    plain = tent_mock.declare()
    assert (plain.name, plain.number) == ("mock", 1000)
    claims = tent_mock.declare("big", 1003, notifications=True, largest_request=4096)
    assert claims.capabilities.notifications
    assert claims.capabilities.largest_request == 4096
    assert claims.capabilities.memory_pairs == plain.capabilities.memory_pairs


# -------------------------------------------------------------------- messages of the engine


def ask(pair: Pair, message: bytes = b"hello") -> Future[bytes] | None:
    return pair.here.transport.exchange(pair.there.segment.snapshot.key, message)


def answered(pair: Pair, message: bytes = b"hello") -> bytes:
    future = ask(pair, message)
    assert future is not None
    return future.result(0)


def test_a_message_is_answered_by_the_engine_of_the_other_side(pair: Pair) -> None:
    pair.there.answer = lambda peer, message: message + b" " + peer.name.encode()
    assert answered(pair) == b"hello " + pair.here.segment.snapshot.name.encode()
    assert pair.there.messages == [(pair.here.segment.snapshot.key, b"hello")]


def test_a_message_goes_both_ways_while_there_is_an_endpoint_at_either_side(pair: Pair) -> None:
    back = pair.here.segment.snapshot.key
    assert answered(pair) == b"hello"
    future = pair.there.transport.exchange(back, b"back")
    assert future is not None
    assert future.result(0) == b"back"
    pair.endpoint.close("the test says so")
    assert ask(pair) is None
    assert pair.there.transport.exchange(back, b"back") is None


def test_a_message_beyond_the_limit_is_refused(pair: Pair) -> None:
    assert len(answered(pair, bytes(EXCHANGE_LIMIT))) == EXCHANGE_LIMIT
    with pytest.raises(TransportError, match="beyond"):
        ask(pair, bytes(EXCHANGE_LIMIT + 1))


def test_what_the_engine_refuses_fails_the_exchange(pair: Pair) -> None:
    def refuse(peer: PeerKey, message: bytes) -> bytes:
        raise TransportError("no message of mine")

    pair.there.answer = refuse
    with pytest.raises(TransportError, match="no message of mine"):
        answered(pair)


def test_a_script_refuses_fails_drops_and_doubles_messages(pair: Pair) -> None:
    control = pair.control
    for do in ("refuse", "fail", "drop", "twice"):
        control.plan(do, on="exchange", at=1)
        future = ask(pair, do.encode())
        if do == "refuse":
            assert future is None
            continue
        assert future is not None
        if do == "fail":
            assert isinstance(future.exception(0), TransportError)
        assert future.done() == (do != "drop")
    arrived = [message for _, message in pair.there.messages]
    assert arrived == [b"drop", b"twice", b"twice"]


def test_a_delayed_message_arrives_late_and_one_that_hangs_when_it_is_released(
    pair: Pair,
) -> None:
    pair.control.plan("delay", on="exchange", at=1, seconds=2)
    pair.control.plan("hang", on="exchange", at=2)
    late, held = ask(pair, b"late"), ask(pair, b"held")
    assert late is not None
    assert held is not None
    pair.control.advance(1)
    assert not late.done()
    pair.control.advance(1)
    assert late.result(0) == b"late"
    assert pair.control.release() == 1
    assert held.result(0) == b"held"


def test_a_message_in_the_air_fails_when_the_transport_stops(pair: Pair) -> None:
    pair.control.plan("hang", on="exchange")
    held = ask(pair)
    pair.here.transport.stop()
    assert held is not None
    with pytest.raises(TransportError, match="stopped"):
        held.result(0)
