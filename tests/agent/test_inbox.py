# SPDX-License-Identifier: Apache-2.0
"""Waiting messages are taken together, for a limited time."""

from ebpflb.agent.loop import MOST_TAKING, Inbox
from ebpflb.model.events import Disturbed


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
