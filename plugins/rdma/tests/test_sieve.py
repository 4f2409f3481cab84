"""The order in which SIEVE lets keys go."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tent_rdma.sieve import Sieve


def anything(_: object) -> bool:
    return True


def filled(keys: str) -> Sieve[str]:
    sieve: Sieve[str] = Sieve()
    for key in keys:
        sieve.add(key)
    return sieve


def drain(sieve: Sieve[str]) -> str:
    order = ""
    while (key := sieve.victim(anything)) is not None:
        sieve.discard(key)
        order += key
    return order


def test_keys_that_were_never_used_go_in_the_order_in_which_they_came() -> None:
    assert drain(filled("abcd")) == "abcd"


def test_a_used_key_is_passed_over_once() -> None:
    sieve = filled("abcd")
    sieve.touch("a")
    assert drain(sieve) == "bcda"


def test_the_hand_goes_on_from_where_it_stopped_so_new_keys_go_before_old_ones_that_were_used() -> (
    None
):
    sieve = filled("abc")
    for key in "ab":
        sieve.touch(key)
    assert sieve.victim(anything) == "c"
    sieve.discard("c")
    sieve.add("d")
    assert drain(sieve) == "abd"  # the hand had come to the end: it begins at the oldest again
    sieve = filled("abcd")
    for key in "ab":
        sieve.touch(key)
    sieve.discard(sieve.victim(anything) or "")
    sieve.add("e")
    assert drain(sieve) == "deab"


def test_a_victim_that_is_not_let_go_is_the_next_victim_too() -> None:
    sieve = filled("abc")
    assert [sieve.victim(anything), sieve.victim(anything), len(sieve)] == ["a", "a", 3]


def test_what_cannot_go_keeps_its_place_and_its_mark() -> None:
    sieve = filled("abc")
    sieve.touch("a")
    assert sieve.victim(lambda key: key != "a") == "b"
    sieve.discard("b")
    assert drain(sieve) == "ca"


def test_there_is_no_victim_where_nothing_can_go() -> None:
    assert Sieve[str]().victim(anything) is None
    assert filled("ab").victim(lambda _: False) is None


def test_a_search_ends_although_every_key_is_used_while_it_is_looked_at() -> None:
    sieve = filled("abc")
    asked = []

    def busy(key: str) -> bool:
        sieve.touch(key)
        asked.append(key)
        return True

    assert sieve.victim(busy) == "a"
    assert len(asked) == 6


def test_a_use_of_a_key_that_is_gone_is_ignored() -> None:
    sieve = filled("a")
    sieve.discard("a")
    sieve.touch("a")
    sieve.discard("a")
    assert len(sieve) == 0
    assert "a" not in sieve


keys = st.integers(0, 9)


class AgainstAList(RuleBasedStateMachine):
    """The model is a plain list, oldest first, and the index of the hand in it."""

    def __init__(self) -> None:
        super().__init__()
        self.sieve: Sieve[int] = Sieve()
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand = 0

    @rule(key=keys)
    def add(self, key: int) -> None:
        self.sieve.add(key)
        if key in self.queue:
            self.visited.add(key)
            return
        self.queue.append(key)

    @rule(key=keys)
    def touch(self, key: int) -> None:
        self.sieve.touch(key)
        if key in self.queue:
            self.visited.add(key)

    @rule(key=keys)
    def discard(self, key: int) -> None:
        self.sieve.discard(key)
        if key in self.queue:
            place = self.queue.index(key)
            self.queue.remove(key)
            self.visited.discard(key)
            if place < self.hand:
                self.hand -= 1
            if self.hand >= len(self.queue):
                self.hand = 0

    @rule(pinned=st.sets(keys), evict=st.booleans())
    def victim(self, pinned: set[int], evict: bool) -> None:
        expected = None
        at = self.hand
        for _ in range(2 * len(self.queue)):
            key = self.queue[at]
            if key not in pinned:
                if key not in self.visited:
                    expected, self.hand = key, at
                    break
                self.visited.discard(key)
            at = (at + 1) % len(self.queue)
        found = self.sieve.victim(lambda key: key not in pinned)
        assert found == expected
        if evict and found is not None:
            self.discard(found)

    @invariant()
    def as_many_as_the_model(self) -> None:
        assert len(self.sieve) == len(self.queue)
        assert all(key in self.sieve for key in self.queue)


TestAgainstAList = AgainstAList.TestCase
