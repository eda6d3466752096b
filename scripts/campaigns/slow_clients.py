"""Hold thousands of slow and silent connections against the whole service and see that nobody notices: `slow_clients`.

For each kind, first tokens are timed without and with the attack in the same run: the slowest hundredth may take at
most twice as long. Health answers all the time, every slow connection is cut in time, and once the attackers are gone
so are their descriptors. Last, more connections come than the proxy takes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from benches.edge_clients import (
    KINDS,
    Attack,
    Probe,
    first_tokens,
    num_descriptors,
    resident_mib,
    seconds_until_back,
    worst,
)
from benches.figures import MIN_P99_SAMPLES, percentile
from benches.service import Target

from campaigns.part import Context, ServiceUnderTest

HEAD_SECONDS, BODY_SECONDS, STALL_SECONDS = 5.0, 5.0, 5.0
"""Of the proxy under attack: none longer than its default, so that meanwhile connections are cut and come again."""

LONGEST_HEALTH_SECONDS = 5.0
SLACK_SECONDS = 5.0
BACK_SECONDS = 10.0
MORE_DESCRIPTORS = 5
MIN_HELD = 0.9
FLOODS = ("flood", "flood_refused")
MAX_TIMES, MAX_TIMES_IN_FLOOD = 2.0, 3.0
"""How many times as long the slowest hundredth of first tokens may take; those who ask without a pause take what both
cores have, as any load does."""

NOISE_SECONDS = 0.04
"""A bound is never below this: a hundredth of all requests meets whatever else two cores have to do, the attackers' own
work among it. The figures themselves are told."""

_SETTINGS: dict[str, Any] = {
    "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "0",
    "PROXY_REQUESTS_PER_MINUTE": "0",
    "PROXY_HEADER_DEADLINE_SECONDS": str(HEAD_SECONDS),
    "PROXY_BODY_GRACE_SECONDS": str(BODY_SECONDS),
    "PROXY_WRITE_STALL_SECONDS": str(STALL_SECONDS),
}
_LONGEST_SECONDS = {
    "header_drip": HEAD_SECONDS,
    "half_request": HEAD_SECONDS,
    "idle": HEAD_SECONDS,
    "body_drip": BODY_SECONDS,
}
"""How long a connection of a kind may last; a slow reader that takes a byte now and then may go on."""


def run(context: Context) -> dict[str, int]:
    """Run every kind of attack; return their sizes, the samples and the proxy's memory in MiB."""
    counts = context.counts
    sizes = {**dict.fromkeys(KINDS, counts["slow"]), "idle": counts["idle"]}
    sizes |= dict.fromkeys(FLOODS, counts["flood"])
    totals = {"samples": 0, "attackers": 0, "cut": 0}
    with context.service(**_SETTINGS) as service:
        for name, size in sizes.items():
            _try(context, service, name, size, totals)
    if num_places := counts["crowded"] // 2:
        with context.service(**_SETTINGS, PROXY_MAX_CONNECTIONS=str(num_places)) as service:
            _try(context, service, "idle", counts["crowded"], totals, num_places)
    return totals


def _try(
    context: Context, service: ServiceUnderTest, name: str, size: int, totals: dict[str, int], num_places: int = 0
) -> None:
    """Run one kind of attack and judge it; once more if first tokens were late, which a busy machine can do as well."""
    called = f"{size} of {name}" + (f" where {num_places} fit" if num_places else "")
    for is_last in (False, True):
        siege = asyncio.run(_besiege(service, name, size, context.counts["samples"]))
        context.log(f"{called}: {siege.told()}")
        totals["samples"] += len(siege.alone) + len(siege.beside)
        totals["attackers"] += size
        totals["cut"] += siege.attack.num_ended
        totals[f"mib_{name}" + ("_beyond" if num_places else "")] = round(siege.mib_attacked)
        max_times = MAX_TIMES_IN_FLOOD if name in FLOODS else MAX_TIMES
        fault = fault_of_tokens(siege.alone, siege.beside, max_times)
        if fault is None or is_last:
            break
        context.log(f"{called}: once more, {fault}")
    context.count(f"{called}: first tokens", fault)
    context.count(f"{called}: health", fault_of_health(siege.probe))
    back = siege.seconds_back
    context.count(f"{called}: descriptors", None if back is not None else f"more than before after {BACK_SECONDS:g} s")
    if not num_places:
        held, longest = siege.num_open, siege.attack.longest_seconds
        is_late = longest > _LONGEST_SECONDS.get(name, float("inf")) + SLACK_SECONDS
        context.count(f"{called}: all held", None if held >= size * MIN_HELD else f"only {held} were open")
        context.count(f"{called}: cut in time", f"one lasted {longest:.1f} s" if is_late else None)


@dataclasses.dataclass(frozen=True, slots=True)
class Siege:
    """What one attack came to; first tokens in seconds."""

    attack: Attack
    probe: Probe
    num_open: int
    alone: Sequence[float]
    beside: Sequence[float]
    mib_alone: float
    mib_attacked: float
    seconds_back: float | None
    """Until the proxy's descriptors were what they had been; None if that took too long."""

    def told(self) -> str:
        """Return the figures as a line."""
        return (
            f"{self.num_open} open, {self.attack.num_ended} cut, longest {self.attack.longest_seconds:.1f} s; "
            f"first tokens {_told(self.alone)} ms alone, {_told(self.beside)} ms beside; "
            f"health at most {worst(self.probe.seconds):g} ms of {len(self.probe.seconds)}; "
            f"proxy {self.mib_alone:g} MiB alone, {self.mib_attacked:g} MiB; descriptors back in {self.seconds_back} s"
        )


async def _besiege(service: ServiceUnderTest, name: str, size: int, num_samples: int) -> Siege:
    target, proxy = Target(int(service.url.rpartition(":")[2]), service.jwt), service.pids["proxy"]
    alone = await first_tokens(target, num_samples)
    descriptors, mib_alone = num_descriptors(proxy), resident_mib(proxy)
    attack = Attack(target, KINDS[name], size, opening_seconds=_LONGEST_SECONDS.get(name, STALL_SECONDS))
    probe = Probe(target)
    async with attack.running():
        num_open = attack.num_open
        async with probe.running():
            beside = await first_tokens(target, num_samples)
        mib_attacked = resident_mib(proxy)
    back = await seconds_until_back(proxy, descriptors + MORE_DESCRIPTORS, BACK_SECONDS)
    return Siege(attack, probe, num_open, alone, beside, mib_alone, mib_attacked, back)


def _slow_share(seconds: Sequence[float]) -> float:
    """Return the 99th percentile, or of too few samples for one the longest."""
    return percentile(sorted(seconds), 99 if len(seconds) >= MIN_P99_SAMPLES else 100)


def _told(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    rank = "p99" if len(ordered) >= MIN_P99_SAMPLES else "all"
    return f"p50 {1000 * percentile(ordered, 50):.1f}, {rank} {1000 * _slow_share(ordered):.1f}"


def fault_of_tokens(alone: Sequence[float], beside: Sequence[float], max_times: float) -> str | None:
    """Say that the slowest first tokens took more than so many times as long; None if they did not."""
    bound = max(max_times * _slow_share(alone), NOISE_SECONDS)
    if _slow_share(beside) <= bound:
        return None
    return f"{_told(beside)} ms beside the attack, {_told(alone)} ms without, the bound is {1000 * bound:.1f}"


def fault_of_health(probe: Probe) -> str | None:
    """Say that a probe of /health failed or took too long; None if none did."""
    if probe.faults or not probe.seconds:
        return f"{len(probe.faults)} of {len(probe.seconds)} probes failed: {probe.faults[:3]}"
    slowest = max(probe.seconds)
    return None if slowest <= LONGEST_HEALTH_SECONDS else f"a probe took {slowest:.1f} s"
