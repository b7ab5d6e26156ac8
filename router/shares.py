"""A limit on what all requests hold together, and each tenant's share of it."""

from __future__ import annotations


class Shares:
    """Amounts held, by tenant. Event loop only.

    Where tenants are told apart, each may hold the limit divided by the number of those that hold something, the one
    that asks, and one more: there is always room for somebody new, whatever the others do. Who holds nothing gets what
    it asks for while the limit itself allows it.
    """

    def __init__(self, limit: int, *, is_fair: bool) -> None:
        self.limit = limit
        self.held = 0
        self._is_fair = is_fair
        self._by_tenant: dict[str, int] = {}

    def shortage(self, tenant: str, amount: int) -> str | None:
        """Why `tenant` may not hold `amount` more, as the end of a sentence; None where it may."""
        if self.held + amount > self.limit:
            return f"{self.held} are held, the limit is {self.limit}"
        mine = self._by_tenant.get(tenant, 0)
        if self._is_fair and mine:
            share = self.limit // (len(self._by_tenant) + 1)
            if mine + amount > share:
                return f"this tenant holds {mine}, its share of the limit is {share} now"
        return None

    def take(self, tenant: str, amount: int) -> None:
        self.held += amount
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + amount

    def give_back(self, tenant: str, amount: int) -> None:
        self.held -= amount
        # Nothing may be held of it: two requests without images, say.
        left = self._by_tenant.get(tenant, 0) - amount
        if left:
            self._by_tenant[tenant] = left
        else:
            self._by_tenant.pop(tenant, None)
