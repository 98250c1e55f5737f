# SPDX-License-Identifier: Apache-2.0
"""Messages of a burst are taken together; all others at once."""

from ebpflb.agent.loop import GATHERING, MOST_TAKING, Bursts, Inbox
from ebpflb.model.events import Disturbed, SourceStatus


class Stream:
    """Messages that come every ``apart`` seconds, also while they are gathered."""

    def __init__(self, apart: float) -> None:
        self.apart, self.now, self.next = apart, 1000.0, 1000.0
        self.inbox, self.slept = Inbox(), 0.0
        self.bursts = Bursts(self.inbox, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        self._pass_until(self.now + seconds)

    def _pass_until(self, now: float) -> None:
        self.now = now
        while self.next <= now:
            self.inbox.put(SourceStatus("it", None))
            self.next += self.apart

    def turn(self) -> int:
        """Wait for the next message as the agent does; return how many are taken."""
        self._pass_until(max(self.now, self.next))
        return len(list(self.bursts.waiting(0.0)))


def test_changes_of_a_burst_share_a_turn_once_it_is_one() -> None:
    """The first changes do not wait; later ones wait GATHERING at most."""
    stream = Stream(0.001)
    assert [stream.turn() for _ in range(6)] == [1] * 6
    assert [stream.turn() for _ in range(10)] == [1 + GATHERING / 0.001] * 10
    stream.next = stream.now + 1.0  # a quiet second: its end waits once, what follows does not
    stream.turn()
    stream.apart = 1.0
    stream.slept = 0.0
    assert [stream.turn() for _ in range(3)] == [1] * 3
    assert stream.slept == 0


def test_the_age_is_that_of_the_oldest_message() -> None:
    """The oldest message that is not handled counts: one that waits, or is in the current turn."""
    now = [10.0]
    inbox = Inbox(lambda: now[0])
    bursts = Bursts(inbox, lambda: now[0], lambda seconds: None)
    assert inbox.age == 0
    for at in (10.0, 12.0):
        now[0] = at
        inbox.put(Disturbed("it"))
    now[0] = 15.0
    assert inbox.age == 5
    assert len(list(bursts.waiting(0.0))) == 2
    inbox.put(Disturbed("later"))
    now[0] = 16.0
    assert inbox.age == 6
    assert len(list(bursts.waiting(0.0))) == 1
    assert inbox.age == 1
    assert list(bursts.waiting(0.0)) == []
    assert inbox.age == 0


def test_messages_that_take_long_are_left_to_the_next_turn() -> None:
    """The changes known so far are written in between; no message is lost."""
    now = [10.0]
    inbox = Inbox(lambda: now[0])
    bursts = Bursts(inbox, lambda: now[0], lambda seconds: None)
    for number in range(6):
        inbox.put(Disturbed(str(number)))
    turns = []
    for _ in range(3):
        turns.append(list[str]())
        for message in bursts.waiting(0.0):
            turns[-1].append(getattr(message, "check", ""))
            now[0] += MOST_TAKING * 0.6
    assert turns == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert list(bursts.waiting(0.0)) == []
    assert inbox.age == 0
