"""A limit on the bytes that all items in one Redis take together, kept by the writers; the least recently used go.

One sorted set, `triptych:1:index`, has a member for each item, `<16 digits of the namespace>:<key>:<bytes>`, scored by
the time of its last save or load in microseconds of that server's clock, and a member `total` scored by minus the sum
of all, which keeps it first. One key, because a Redis that evicts by itself then takes all of it or nothing. It lies on
one node of a cluster; the items lie anywhere.

A writer first enters its item and is told whom to remove for it, then removes those, then takes them out of the set: if
it dies in between, the next writer is told the same ones. Whoever is told of is marked (its score is 1), because
its own writer may not be done: having made its item visible, a writer looks whether it was marked meanwhile, and then
removes it. A mark is only taken away by another writer of the item.

What this leaves approximate: items whose entries were lost are not counted until they are loaded, and an entry whose
item was lost is counted until it is the oldest. Each script looks at a bounded number of members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from connectors.ec.redis_errors import UnreachableError
from connectors.ec.redis_link import Command
from connectors.ec.store import ItemError

T = TypeVar("T")

INDEX = b"triptych:1:index"
#: Members that one call of a script looks at, and calls that one save makes before it gives up.
_MAX_VICTIMS = 256
_MAX_ROUNDS = 16
#: What a value costs besides its bytes: key, object, entry of Redis's own tables.
_VALUE_BYTES = 512

_COMMON = b"""
local index = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local function number(n) return string.format('%.0f', n) end
local function size_of(member) return tonumber(string.match(member, '%d+$')) end
local function total() return -tonumber(redis.call('ZSCORE', index, 'total') or '0') end
local function set_total(n) redis.call('ZADD', index, number(-n), 'total') end
local doomed = 1
local function is_doomed(member) return tonumber(redis.call('ZSCORE', index, member) or '-1') == doomed end
"""

#: ARGV: member, limit in bytes, life of an unused item in ms, most members to look at. Returns whether the member is
#: new, who is to go, and whether that is enough. Members so old that their items have expired are dropped at once.
_ENTER = (
    _COMMON
    + b"""
local member, limit, life, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local sum = total()
for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '(' .. doomed, number(now - life * 1000), 'LIMIT', 0, most)) do
  redis.call('ZREM', index, old)
  sum = sum - size_of(old)
end
local added = redis.call('ZADD', index, number(now), member)
if added == 1 then sum = sum + size_of(member) end
set_total(sum)
redis.call('PEXPIRE', index, number(life * 2))
local excess, victims = sum - limit, {}
if excess > 0 then
  for _, old in ipairs(redis.call('ZRANGE', index, 1, most)) do
    if old ~= member then
      victims[#victims + 1] = old
      redis.call('ZADD', index, doomed, old)
      excess = excess - size_of(old)
      if excess <= 0 then break end
    end
  end
end
return {added, victims, excess <= 0 and 1 or 0}
"""
)

#: ARGV: whether only those are meant that are doomed still, members whose items are gone. Returns how many of them this
#: call took out.
_LEAVE = (
    _COMMON
    + b"""
local sum, count = total(), 0
for n, member in ipairs(ARGV) do
  if n > 1 and (ARGV[1] == '0' or is_doomed(member)) and redis.call('ZREM', index, member) == 1 then
    sum = sum - size_of(member)
    count = count + 1
  end
end
if count > 0 then set_total(sum) end
return count
"""
)

#: ARGV: member, life of an unused item in ms, whether its item is known to be there. Returns whether it may stay. The
#: set lives as long as the items in it, which live on by being loaded.
_TOUCH = (
    _COMMON
    + b"""
local member, life, is_there = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
if is_doomed(member) or not (is_there or redis.call('ZSCORE', index, member)) then return 0 end
if redis.call('ZADD', index, number(now), member) == 1 then set_total(total() + size_of(member)) end
redis.call('PEXPIRE', index, number(life * 2))
return 1
"""
)


class _Entered(msgspec.Struct, array_like=True):
    added: int
    victims: list[bytes]
    is_enough: int


class ByteCap:
    """`ask` sends one command to the server that holds INDEX and returns its reply; `remove` removes items, each a
    namespace's 16 digits and a key. Both may block and raise StoreError. Any thread."""

    def __init__(
        self,
        max_bytes: int,
        life_ms: int,
        ask: Callable[[Command], object],
        remove: Callable[[Sequence[tuple[str, str]]], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._life_ms = life_ms
        self._ask = ask
        self._remove = remove

    def make_room(self, namespace: str, key: str, num_bytes: int, num_values: int) -> tuple[bool, int]:
        """Enter an item that is about to be saved and remove others until it fits. Whether the item was not entered
        before, and how many this call removed. Raises ItemError where it cannot be made to fit."""
        member = _member(namespace, key, num_bytes, num_values)
        if _size_of(member) > self._max_bytes:
            raise ItemError(f"the item is larger than max_bytes={self._max_bytes}")
        arguments = [member, b"%d" % self._max_bytes, b"%d" % self._life_ms, b"%d" % _MAX_VICTIMS]
        is_new, num_removed = False, 0
        for _ in range(_MAX_ROUNDS):
            entered = _convert(self._ask([b"EVAL", _ENTER, b"1", INDEX, *arguments]), _Entered)
            is_new |= bool(entered.added)
            if entered.victims:
                self._remove([_item_of(victim) for victim in entered.victims])
                num_removed += self._leave(entered.victims, only_doomed=True)
            if entered.is_enough:
                return is_new, num_removed
        self._leave([member])
        raise ItemError(f"no room under max_bytes={self._max_bytes}, though {num_removed} items were removed for it")

    def settle(self, namespace: str, key: str, num_bytes: int, num_values: int) -> int:
        """The item has become visible. Remove it where others made room for theirs meanwhile by removing it, before it
        was there. How many items this call removed."""
        member = _member(namespace, key, num_bytes, num_values)
        if self._touch(member, is_there=False):
            return 0
        self._remove([_item_of(member)])
        return self._leave([member], only_doomed=True)

    def give_back(self, namespace: str, key: str, num_bytes: int, num_values: int) -> None:
        """The item was not saved after all."""
        self._leave([_member(namespace, key, num_bytes, num_values)])

    def touch(self, namespace: str, key: str, num_bytes: int, num_values: int) -> None:
        """The item was loaded, or saved again, and lives on. It counts from now on, should its entry have been lost."""
        self._touch(_member(namespace, key, num_bytes, num_values), is_there=True)

    def _touch(self, member: bytes, *, is_there: bool) -> bool:
        arguments = [member, b"%d" % self._life_ms, b"%d" % is_there]
        return bool(_convert(self._ask([b"EVAL", _TOUCH, b"1", INDEX, *arguments]), int))

    def _leave(self, members: Sequence[bytes], *, only_doomed: bool = False) -> int:
        return _convert(self._ask([b"EVAL", _LEAVE, b"1", INDEX, b"%d" % only_doomed, *members]), int)


def _convert(reply: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(reply, kind)
    except msgspec.ValidationError:
        raise UnreachableError("the index of the byte cap answers nonsense") from None


def _member(namespace: str, key: str, num_bytes: int, num_values: int) -> bytes:
    return f"{namespace[:16]}:{key}:{num_bytes + num_values * _VALUE_BYTES}".encode()


def _size_of(member: bytes) -> int:
    return int(member.rpartition(b":")[2])


def _item_of(member: bytes) -> tuple[str, str]:
    namespace, key, _ = member.decode().split(":")
    return namespace, key
