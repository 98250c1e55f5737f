# SPDX-License-Identifier: Apache-2.0
"""Messages of a burst are taken together, others at once, and all for a limited time."""

from ebpflb.agent.loop import GATHERING, MOST_TAKING, Inbox
from ebpflb.model.events import Disturbed


class Stream:
    """Messages that come every ``apart`` seconds, also while others are gathered."""

    def __init__(self, apart: float) -> None:
        self.apart, self.now, self.next, self.slept = apart, 1000.0, 1000.0, 0.0
        self.inbox = Inbox(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        self._pass_until(self.now + seconds)

    def _pass_until(self, now: float) -> None:
        self.now = now
        while self.next <= now:
            self.inbox.put(Disturbed("it"))
            self.next += self.apart

    def turn(self) -> int:
        """Wait for the next message as the agent does; return how many are taken."""
        self._pass_until(max(self.now, self.next))
        return len(list(self.inbox.waiting(0.0)))


def test_messages_of_a_burst_share_a_turn_once_it_is_one() -> None:
    """The first messages do not wait, later ones wait for GATHERING at most, and those that come
    100 times a second never.
    """
    stream = Stream(0.001)
    assert [stream.turn() for _ in range(5)] == [1] * 5
    assert [stream.turn() for _ in range(10)] == [1 + GATHERING / 0.001] * 10
    stream.apart, stream.next, stream.slept = 0.01, stream.now + 1.0, 0.0
    assert [stream.turn() for _ in range(20)] == [1] * 20
    assert stream.slept == 0


def test_the_age_is_that_of_the_oldest_message() -> None:
    """The age is that of the oldest message not handled yet: one that waits, or is in the current
    turn.
    """
    now = [10.0]
    inbox = Inbox(lambda: now[0])
    assert inbox.age == 0
    for at in (10.0, 12.0):
        now[0] = at
        inbox.put(Disturbed("it"))
    now[0] = 15.0
    assert inbox.age == 5
    assert len(list(inbox.waiting(0.0))) == 2
    inbox.put(Disturbed("later"))
    now[0] = 16.0
    assert inbox.age == 6
    assert len(list(inbox.waiting(0.0))) == 1
    assert inbox.age == 1
    assert list(inbox.waiting(0.0)) == []
    assert inbox.age == 0


def test_messages_that_take_long_are_left_to_the_next_turn() -> None:
    """The changes known so far are written between the turns; no message is lost."""
    now = [10.0]
    inbox = Inbox(lambda: now[0])
    for number in range(6):
        inbox.put(Disturbed(str(number)))
    turns = []
    for _ in range(3):
        turns.append(list[str]())
        for message in inbox.waiting(0.0):
            turns[-1].append(getattr(message, "check", ""))
            now[0] += MOST_TAKING * 0.6
    assert turns == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert list(inbox.waiting(0.0)) == []
    assert inbox.age == 0
