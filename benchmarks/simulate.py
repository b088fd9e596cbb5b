"""`kvjax.simulate`: what it takes, and how far a sample of the keys is off.

    python benchmarks/simulate.py [--keys N] [--steps S] [--batch B]

Keys by Zipf's law (exponent 1). Points are hundredths of the hit rate, beside the replay of all keys; seconds are those
of a second run, so that programs are compiled.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from common import zipf

import kvjax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=300_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8192)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    log = list(zipf(rng, args.keys, (args.steps, args.batch), 1.0) * 7919)
    distinct = len(np.unique(np.concatenate(log)))
    limits = [max(args.keys // part, args.batch) for part in (30, 6, 2)] + [None]
    print(f"{args.steps * args.batch:,} occurrences of {distinct:,} keys, limits {limits}")
    whole: list[float] = []
    for sample in (1.0, 0.1, 0.02):
        kvjax.simulate(log[:2], limits, sample=sample)
        begun = time.perf_counter()
        rates = [found.hit_rate for found in kvjax.simulate(log, limits, sample=sample)]
        seconds = time.perf_counter() - begun
        whole = whole or rates
        off = ", ".join(f"{100 * abs(a - b):.1f}" for a, b in zip(rates, whole, strict=True))
        text = ", ".join(f"{rate:.3f}" for rate in rates)
        print(f"sample {sample:4}: {seconds:.2f} s; hit rates {text}; off by {off} points", flush=True)


if __name__ == "__main__":
    main()
