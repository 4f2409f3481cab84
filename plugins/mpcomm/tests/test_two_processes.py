"""One suite between two processes: on the stand-in always, unchanged on the library where it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpcomm_library import missing

import tent_core as tent
from tent_core.testing.peers import PeerProcess
from tent_core.testing.waiting import wait_until

MIB = 1 << 20
CONFIG: dict[str, Any] = {
    "transports": {"mpcomm": {"enable": True, "connect_timeout": "1s"}},
    "policy": [{"name": "only", "transports": ["mpcomm"]}],
    "log": {"level": "error"},
}


class TwoProcesses:
    """WRITE, then READ, byte for byte."""

    @pytest.fixture(scope="class")
    @classmethod
    def there(cls) -> Iterator[PeerProcess]:
        with PeerProcess(CONFIG) as peer:
            peer.run(f"pool = engine.allocate({4 * MIB}, name='pool')")
            peer.run(f"own = engine.register(np.zeros({MIB}, np.uint8), name='own')")
            yield peer

    @pytest.fixture(scope="class")
    @classmethod
    def here(cls) -> Iterator[tent.Engine]:
        with tent.Engine(CONFIG) as engine:
            yield engine

    @pytest.mark.parametrize("name", ["pool", "own"])
    def test_what_is_written_is_there_and_what_is_read_comes_back(
        self, here: tent.Engine, there: PeerProcess, name: str
    ) -> None:
        with here.open_segment(there.segment_name) as segment:
            remote = segment.buffer(name)
            content = np.random.default_rng(1).integers(0, 256, remote.length, np.uint8)
            source, back = here.register(content), here.allocate(remote.length)
            segment.write(source, remote)
            assert there.run(f"bytes(engine.buffers()[{name == 'own'}].array)") == content.tobytes()
            segment.read(back, remote)
            assert np.array_equal(back.array, content)

    def test_many_blocks_go_to_their_places(self, here: tent.Engine, there: PeerProcess) -> None:
        random = np.random.default_rng(2)
        with here.open_segment(there.segment_name) as segment:
            source = here.allocate(4 * MIB)
            source.array[:] = random.integers(0, 256, 4 * MIB, np.uint8)
            places = random.permutation(1024) * 4096
            remote = segment.buffer("pool")
            batch = segment.write_many(source, np.arange(1024) * 4096, remote, places, 4096)
            assert batch.transports() == {"mpcomm": 4 * MIB}
            arrived = np.frombuffer(there.run("bytes(pool.array)"), np.uint8).reshape(-1, 4096)
            assert np.array_equal(arrived[places // 4096], source.array.reshape(-1, 4096))


@pytest.mark.usefixtures("stand_in_on_the_path")
class TestOnTheStandIn(TwoProcesses):
    def test_a_stopped_peer_fails_new_transfers_in_time_and_stops_no_thread_here(self) -> None:
        config = {**CONFIG, "transports": {"mpcomm": {"enable": True, "connect_timeout": "300ms"}}}
        with tent.Engine(config) as here, PeerProcess(config) as there:
            there.run("pool = engine.allocate(4096, name='pool')")
            with here.open_segment(there.segment_name) as segment:
                source = here.allocate(4096)
                there.stop()
                ticks, ended = [0], threading.Event()

                def tick() -> None:
                    while not ended.wait(0.001):
                        ticks[0] += 1

                thread = threading.Thread(target=tick, daemon=True)
                thread.start()
                with pytest.raises(tent.TentError):
                    segment.write(source, segment.buffer("pool"), timeout=10)
                seen = ticks[0]
                wait_until(lambda: ticks[0] > seen)
                ended.set()
                thread.join(10)
                assert seen > 10
                there.resume()
                segment.write(source, segment.buffer("pool"))


@pytest.mark.skipif(bool(missing()), reason=f"needs the library and a device: {missing()}")
class TestOnTheLibrary(TwoProcesses):
    pass
