"""Whatever became of a stored item, a load is the right tensor or a reason; and the item can be made again."""

from __future__ import annotations

from collections.abc import Callable

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import digest, expect
from connectors.conformance.harness import Damage, StoredItem
from connectors.conformance.kit import Kit
from core.types import ECRole

_ABOUT = {
    Damage.FLIPPED_BIT: "One flipped bit of the payload",
    Damage.GARBAGE: "An item overwritten with other bytes",
    Damage.TRUNCATED: "An item cut short",
    Damage.EMPTIED: "An item of which nothing is left but its name",
    Damage.SWAPPED: "Two items whose payloads were exchanged",
    Damage.MISPLACED: "All of another item in the place of an item",
    Damage.FOREIGN: "The item of another namespace, with the same key, in the place of an item",
    Damage.OLDER_VERSION: "A stale item, of an older format version",
    Damage.NEWER_VERSION: "An item of a newer format version",
}


def _damaged(how: Damage) -> Callable[[Kit], None]:
    def run(kit: Kit) -> None:
        other_space = digest(kit.namespace, "another")
        producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
        spoilt, neighbour, bystander = kit.key("spoilt"), kit.key("neighbour"), kit.key("bystander")
        items = {key: kit.save(producer, key, 40) for key in (spoilt, neighbour, bystander)}
        other = None
        if how is Damage.FOREIGN:
            theirs = kit.engine(ECRole.PRODUCER, namespace=other_space)
            theirs.sources = {}
            kit.save(theirs, spoilt, 40, variant="theirs")
            kit.close(theirs)
            other = StoredItem(other_space, spoilt)
        elif how in (Damage.SWAPPED, Damage.MISPLACED):
            other = StoredItem(kit.namespace, neighbour)
        kit.damage(spoilt, how, other=other)

        kit.may_fetch(consumer, spoilt, items[spoilt])
        if how is Damage.SWAPPED:
            kit.may_fetch(consumer, neighbour, items[neighbour])
        kit.must_fetch(consumer, bystander, items[bystander])

        for key in (spoilt, neighbour):  # as the engine does with what is missing
            kit.save(producer, key, 40)
        kit.eventually(lambda: consumer.look_up(spoilt), "an item made again after damage is not found")
        kit.must_fetch(consumer, spoilt, items[spoilt])
        kit.must_fetch(consumer, neighbour, items[neighbour])

    run.__doc__ = f"{_ABOUT[how]}: missing or a failed load, never a wrong tensor, and a save repairs it."
    return run


for _how in Damage:
    check(f"damage/{_how.replace(' ', '_')}")(_damaged(_how))


@check("damage/repaired_unread")
def _repaired_unread(kit: Kit) -> None:
    """A save of an item that was damaged, and that nobody has tried to load since, repairs it."""
    producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    embeds = kit.save(producer, kit.key(1), 40)
    kit.damage(kit.key(1), Damage.FLIPPED_BIT)
    kit.save(producer, kit.key(1), 40)
    expect(consumer.look_up(kit.key(1)), "an item made again after damage is not found")
    kit.must_fetch(consumer, kit.key(1), embeds)
