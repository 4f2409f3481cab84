"""The parts of the suite that a transport to files can pass: its remote side is files, not memory."""

from __future__ import annotations

import numpy as np

from tent_core.testing.conformance.base import KIB, Base, Ends
from tent_core.testing.conformance.batches import Batches
from tent_core.testing.conformance.buffers import Buffers
from tent_core.testing.conformance.cancellation import Cancellation
from tent_core.testing.conformance.claims import Claims
from tent_core.testing.conformance.content import Content
from tent_core.testing.conformance.departures import Departures
from tent_core.testing.conformance.permissions import Permissions
from tent_core.testing.leaks import nothing_stays_behind
from tent_core.types import MemoryKind


class Files(Base):
    """What only files can show."""

    def test_what_is_written_is_in_the_file_and_what_is_in_the_file_is_read(
        self, ends: Ends
    ) -> None:
        assert ends.files is not None
        path = ends.files / "pages"
        path.write_bytes(bytes(64 * KIB))
        pages = ends.there.register(path, name="pages")
        source = ends.buffer(ends.here, ends.bytes(4 * KIB))
        ends.segment.write(source, ends.remote(pages)[8 * KIB : 12 * KIB])
        content = path.read_bytes()
        assert content[8 * KIB : 12 * KIB] == source.array.tobytes()
        assert not any(content[: 8 * KIB] + content[12 * KIB :])
        pages.unregister()
        assert path.read_bytes() == content

    def test_closing_leaves_no_descriptor_thread_process_or_mapping(self, ends: Ends) -> None:
        def life() -> None:
            with self.engine() as here, self.engine() as there:
                target = ends.offer(there, ends.bytes(64 * KIB))
                with here.open_segment(there.segment_name) as segment:
                    source = here.register(np.ones(64 * KIB, np.uint8))
                    segment.write(source, segment.buffer(target.name))
                    segment.read(source, segment.buffer(target.name))

        life()
        with nothing_stays_behind():
            life()


class FileConformance(
    Files, Claims, Departures, Cancellation, Buffers, Permissions, Batches, Content
):
    """Subclass it as `TransportConformance`, for a transport from host memory to files."""

    remote_kind = MemoryKind.FILE
