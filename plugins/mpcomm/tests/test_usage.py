"""When the library may be made anew, and what it keeps until then."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tent_core.descriptor import PeerKey
from tent_mpcomm.usage import Usage

PEERS = [PeerKey(f"peer:{n}", bytes([n]) * 16) for n in range(3)]


def test_connections_of_peers_that_have_gone_are_counted_at_either_side() -> None:
    usage = Usage(5)
    usage.connected("a")
    usage.announced(PEERS[0], "x.0")
    assert (usage.outgoing, usage.incoming, usage.retained) == (1, 1, 0)
    usage.unused("a")
    usage.left(PEERS[0])
    assert (usage.outgoing, usage.incoming, usage.retained) == (0, 0, 2)


def test_a_peer_that_returns_uses_the_connection_that_was_kept_for_it() -> None:
    usage = Usage(5)
    for _ in range(3):
        usage.connected("a")
        usage.announced(PEERS[0], "x.0")
        usage.unused("a")
        usage.left(PEERS[0])
    assert usage.retained == 2


def test_a_peer_that_goes_on_under_another_host_id_leaves_the_old_connection_behind() -> None:
    usage = Usage(5)
    usage.announced(PEERS[0], "x.0")
    usage.announced(PEERS[0], "x.1")
    assert (usage.incoming, usage.retained) == (1, 1)


def test_it_is_replaced_past_the_cap_when_nothing_is_under_way_and_no_peer_needs_it() -> None:
    usage = Usage(0)
    assert not usage.try_replace()
    usage.connected("a")
    usage.unused("a")
    assert usage.begin()
    assert not usage.try_replace()
    usage.end()
    usage.announced(PEERS[0], "x.0")
    assert not usage.try_replace()
    usage.left(PEERS[0])
    assert usage.try_replace()
    assert not usage.try_replace()
    assert not usage.begin()
    assert not usage.announced(PEERS[1], "y.0")
    usage.replaced()
    assert usage.retained == 0
    assert usage.begin()


class Anything(RuleBasedStateMachine):
    """Whatever happens in whatever order, nobody's connection or transfer is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = Usage(1)
        self.users = 0
        self.there: set[PeerKey] = set()

    @rule(peer=st.sampled_from(PEERS), host_id=st.sampled_from("xyz"))
    def announce(self, peer: PeerKey, host_id: str) -> None:
        if self.usage.announced(peer, host_id):
            self.there.add(peer)

    @rule(peer=st.sampled_from(PEERS))
    def leave(self, peer: PeerKey) -> None:
        self.usage.left(peer)
        self.there.discard(peer)

    @rule(host_id=st.sampled_from("abc"), used=st.booleans())
    def use(self, host_id: str, used: bool) -> None:
        (self.usage.connected if used else self.usage.unused)(host_id)

    @rule()
    def begin(self) -> None:
        self.users += self.usage.begin()

    @precondition(lambda self: self.users)
    @rule()
    def end(self) -> None:
        self.usage.end()
        self.users -= 1

    @rule()
    def replace(self) -> None:
        if self.usage.try_replace():
            assert not self.users
            assert not self.there
            self.usage.replaced()
            assert (self.usage.retained, self.usage.outgoing) == (0, 0)

    @invariant()
    def counts_are_of_peers_that_are_there(self) -> None:
        assert self.usage.incoming == len(self.there)
        assert self.usage.users == self.users
        unused = [*self.usage._outgoing.values(), *self.usage._incoming.values()].count(False)
        assert self.usage.retained == unused


TestAnything = Anything.TestCase
