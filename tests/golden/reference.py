"""Hashes and initial rows in NumPy, written from the papers and not from the C++: what the tests compare with.

Floating-point operations stand in the order of kvjax/ffi/core/random.h, so that the bits must agree.
"""

from __future__ import annotations

import numpy as np

BUCKETS = 2**16
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64; any shape, uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bucket_of(keys: np.ndarray) -> np.ndarray:
    return (mix(keys.view(np.uint64)) % np.uint64(BUCKETS)).astype(np.int64)


def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Philox4x32-10 of four words (any shape, uint64 below 2**32) under a 64-bit key."""
    mask = np.uint64(0xFFFFFFFF)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        c0, c1, c2, c3 = counter
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        counter = [
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & mask,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & mask,
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return counter


def portable_log(x: np.ndarray) -> np.ndarray:
    m, exponent = np.frexp(x)
    low = m < 0.70710678118654752440
    m, exponent = np.where(low, m * 2.0, m), np.where(low, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = np.full_like(x, 1.0 / 17.0)
    for k in range(15, 0, -2):
        total = total * z + 1.0 / k
    return exponent * 0.69314718055994530942 + 2.0 * s * total


def inverse_normal(p: np.ndarray) -> np.ndarray:
    """AS 241, PPND7."""
    q = p - 0.5
    r = 0.180625 - q * q
    middle = (
        q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179)
        / (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0)
    )  # fmt: skip
    root = np.sqrt(-portable_log(np.where(q < 0, p, 1.0 - p)))
    r = root - 1.6
    tail = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) / (
        (0.12021132975 * r + 0.73700164250) * r + 1.0
    )
    r = root - 5.0
    far = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) / (
        (0.012258202635 * r + 0.24197894225) * r + 1.0
    )
    outside = np.where(root <= 5.0, tail, far)
    return np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -outside, outside))


def pool_rows(pool: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Each key's row of a pool ``(p, dim)``: ``(n, dim)``."""
    return pool[[int(h) * len(pool) >> 64 for h in mix(keys.view(np.uint64))]]


def initial_rows(initializer, keys: np.ndarray, dim: int, seed: int) -> np.ndarray:
    """``(n, dim)`` float32."""
    words = keys.view(np.uint64)[:, None]
    block = np.arange(-(-dim // 4), dtype=np.uint64)[None, :]
    zero = np.zeros((len(keys), block.shape[1]), np.uint64)
    counter = [(words & np.uint64(0xFFFFFFFF)) + zero, (words >> np.uint64(32)) + zero, block + zero, zero]
    random = np.stack(philox(counter, seed), -1).reshape(len(keys), -1)[:, :dim]
    u = (random.astype(np.float64) + 0.5) * 2.0**-32
    a, b = initializer.a, initializer.b
    values = {
        "constant": lambda: np.full(u.shape, a),
        "uniform": lambda: a + (b - a) * u,
        "normal": lambda: a + b * inverse_normal(u),
        "truncated_normal": lambda: a + b * inverse_normal(0.022750131948179195 + 0.95449973610364159 * u),
    }[initializer.kind]()
    return values.astype(np.float32)
