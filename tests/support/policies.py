"""Reference for eviction: which rows of a dict a policy of kvjax.evict chooses."""

import dataclasses
import math

import numpy as np

import kvjax

_M = 2**64 - 1


def mix(key):
    """The hash that breaks ties and chooses buckets: the finaliser of splitmix64."""
    x = key & _M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M
    return x ^ (x >> 31)


def chosen_rows(policy, candidates, step, needed):
    """[(key, reason)] of the rows among {key: Row} that go; each for the first alternative that chooses it."""
    going = {}
    for part in policy.alternatives():
        reason = repr(part)
        if part is policy and getattr(part, "n", None) is not None:  # it alone makes all the space
            part = dataclasses.replace(part, n=max(part.n, needed))
        for key in chosen(part, candidates, step, needed):
            going.setdefault(key, reason)
    return list(going.items())


def chosen(policy, rows, step, needed):
    kind = type(policy).__name__
    if kind == "_Both":
        left, right = (chosen(p, rows, step, needed) for p in (policy.left, policy.right))
        return left & right if policy.op == "and" else left | right
    if kind == "_Not":
        return set(rows) - chosen(policy.inner, rows, step, needed)
    tests = {
        "MaxAge": lambda k, r: step - r.version > policy.steps,
        "MinFrequency": lambda k, r: r.frequency < policy.count,
        "MinNorm": lambda k, r: not np.sqrt(np.sum(np.square(np.asarray(r.value, np.float64)))) >= policy.norm,
        "MinScore": lambda k, r: score(policy, k, r) < policy.bound,
    }
    if kind in tests:
        return {k for k, r in rows.items() if tests[kind](k, r)}

    def decayed(r):
        """The logarithm of what is left, without what is the same for all rows, in units of 2**-24."""
        if policy.half_life is None or r.frequency == 0:
            return r.frequency or -math.inf
        units = (math.log2(r.frequency), r.version / policy.half_life)
        return sum(math.floor(x * 2.0**24 + 0.5) for x in units)

    orders = {
        "LeastRecent": lambda k, r: r.version,
        "LeastFrequent": lambda k, r: decayed(r),
        "LowestScore": lambda k, r: score(policy, k, r),
    }
    n = needed if policy.n is None else policy.n
    return set(sorted(rows, key=lambda k: (orders[kind](k, rows[k]), mix(k)))[:n])


def score(policy, key, row):
    one = kvjax.Exported(
        keys=np.array([key]), values=np.asarray(row.value)[None], freqs=np.array([row.frequency]),
        versions=np.array([row.version]), slots={}, has_slots=np.array([False]), pinned=np.array([False]),
        last_step=0, total=1,
    )  # fmt: skip
    return float(policy.score(one)[0])
