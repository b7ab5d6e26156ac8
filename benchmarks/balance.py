"""How well encoders share the work, and how often an image meets the encoder that has it: a simulation, no servers.

The routing policy is the real one, and so are the counts of load that it sees; encoders are caches of `--items` items
that forget the least recently used. Images are drawn from a catalogue by Zipf's law, each with a size that stays its
own. `--in-hand` calls are under way at a time, the oldest ends first. Everything comes from `--seed`.

    python -m benchmarks.balance [--policy NAME] [--encoders N] [--items N] [--catalogue N] [--zipf X] [--requests N]

What is printed: work of the busiest and the least busy encoder over the mean, in embeddings; of the requests whose item
some encoder had cached, the share that met it ("met"); of all requests, the share that met it ("hits"); and of all
keys, the share whose home moves when one encoder is added or removed, beside what would be ideal.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import OrderedDict, deque

import click
import msgspec

from core.types import Stage
from router.hash_ring import HashRing
from router.policies.registry import POLICIES, make_policy
from router.work import Work

#: Embeddings of an image, and how often that size occurs.
_SIZES = {64: 2, 196: 5, 256: 2, 1024: 1}


class Encoder:
    """A cache of `max_items` items, and what the router counts of a worker."""

    def __init__(self, address: str, max_items: int) -> None:
        self.address = address
        self.calls = 0
        self.cost = 0.0
        self.kv_tokens = self.other_calls = self.waiting = self.other_kv_tokens = self.kv_capacity = 0
        self.done = 0  # embeddings of all calls
        self._max_items = max_items
        self._items: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, item: int) -> bool:
        return item in self._items

    def take(self, item: int, num_embeds: int) -> None:
        """Encode `item`, or find it."""
        self.done += num_embeds
        self._items[item] = None
        self._items.move_to_end(item)
        if len(self._items) > self._max_items:
            self._items.popitem(last=False)


class Result(msgspec.Struct):
    """See the head of this file. Shares are 0 to 1."""

    busiest: float
    least_busy: float
    met: float
    hits: float
    us_per_choice: float


def simulate(
    policy_name: str = "consistent-hash",
    *,
    encoders: int = 16,
    items: int = 200,
    catalogue: int = 10_000,
    zipf: float = 1.0,
    requests: int = 100_000,
    in_hand: int = 32,
    seed: int = 1,
) -> Result:
    """Send `requests` images to `encoders` and count. Deterministic but for `us_per_choice`, microseconds of CPU."""
    rng = random.Random(seed)
    policy = make_policy("--policy", policy_name)
    fleet = [Encoder(f"10.0.0.{i}:50061", items) for i in range(encoders)]
    for encoder in fleet:
        policy.joined(encoder)
    keys = [rng.randbytes(32) for _ in range(catalogue)]
    sizes = rng.choices(list(_SIZES), list(_SIZES.values()), k=catalogue)
    weights = list(itertools.accumulate(1 / rank**zipf for rank in range(1, catalogue + 1)))
    under_way: deque[tuple[Encoder, float]] = deque()
    cached = met = hits = 0
    choosing_s = 0.0
    for item in rng.choices(range(catalogue), cum_weights=weights, k=requests):
        work = Work(stage=Stage.ENCODER, cost=sizes[item], key=keys[item])
        start_s = time.process_time()
        chosen = policy.choose(work, fleet)
        charge = policy.charge(work, chosen)
        policy.assigned(work, chosen)
        choosing_s += time.process_time() - start_s
        encoder = next(encoder for encoder in fleet if encoder is chosen)
        has_it = item in encoder
        hits += has_it
        if has_it or any(item in other for other in fleet):
            cached += 1
            met += has_it
        encoder.take(item, sizes[item])
        encoder.calls += 1
        encoder.cost += charge
        under_way.append((encoder, charge))
        if len(under_way) > in_hand:
            first, charged = under_way.popleft()
            first.calls -= 1
            first.cost -= charged
    mean = sum(encoder.done for encoder in fleet) / encoders
    return Result(
        busiest=max(encoder.done for encoder in fleet) / mean,
        least_busy=min(encoder.done for encoder in fleet) / mean,
        met=met / max(1, cached),
        hits=hits / requests,
        us_per_choice=1e6 * choosing_s / requests,
    )


def moved(*, encoders: int = 16, keys: int = 10_000, seed: int = 1) -> tuple[float, float]:
    """Shares of the keys whose home moves when one encoder is added to, and one removed from, `encoders`."""
    rng = random.Random(seed)
    wanted = [rng.randbytes(32) for _ in range(keys)]
    ring = HashRing()
    for i in range(encoders):
        ring.add(f"10.0.0.{i}:50061")

    def homes() -> list[str]:
        return [next(ring.walk(key)) for key in wanted]

    before = homes()
    ring.add("10.0.1.0:50061")
    added = homes()
    ring.remove("10.0.1.0:50061")
    ring.remove("10.0.0.0:50061")
    removed = homes()
    return tuple(  # type: ignore[return-value]
        sum(a != b for a, b in zip(before, after, strict=True)) / keys for after in (added, removed)
    )


@click.command()
@click.option("--policy", default="consistent-hash", show_default=True, help=f"One of {', '.join(POLICIES)}, or more.")
@click.option("--encoders", default=16, show_default=True)
@click.option("--items", default=200, show_default=True, help="Items that an encoder keeps.")
@click.option("--catalogue", default=10_000, show_default=True, help="Images that there are.")
@click.option("--zipf", default=1.0, show_default=True, help="Exponent; 0: all as frequent.")
@click.option("--requests", default=100_000, show_default=True)
@click.option("--in-hand", default=32, show_default=True, help="Calls under way at a time.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One object instead of lines.")
def main(
    *, policy: str, encoders: int, items: int, catalogue: int, zipf: float, requests: int, in_hand: int, seed: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Simulate and print."""
    result = simulate(
        policy, encoders=encoders, items=items, catalogue=catalogue, zipf=zipf, requests=requests, in_hand=in_hand,
        seed=seed,
    )  # fmt: skip
    added, removed = moved(encoders=encoders, keys=catalogue, seed=seed)
    if as_json:
        values = {**msgspec.structs.asdict(result), "moved_by_adding": added, "moved_by_removing": removed}
        click.echo(json.dumps({name: round(value, 4) for name, value in values.items()}))
        return
    click.echo(f"busiest {result.busiest:.3f} of the mean, least busy {result.least_busy:.3f}")
    click.echo(f"met {result.met:.1%} of what was cached somewhere; hits {result.hits:.1%} of all")
    click.echo(f"moved by adding one {added:.1%} (ideal {1 / (encoders + 1):.1%}), by removing one {removed:.1%}")
    click.echo(f"{result.us_per_choice:.1f} us of CPU a choice")


if __name__ == "__main__":
    main()
