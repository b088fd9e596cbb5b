"""Initial rows without the C++ core: what keys without a row read as, to the bit.

The arithmetic of ``kvjax/ffi/core/random.h``, in its order, over NumPy (`xp` is ``numpy``) or over JAX with
64-bit types (``jax.numpy``), where a compiler may fuse a product and a sum, and the last bit may be another.

Sources: Philox4x32-10: Salmon et al., SC 2011. The inverse normal: Wichura, AS 241, Applied Statistics 37 (1988).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax._values.distributions import DISTRIBUTIONS

KINDS = (*DISTRIBUTIONS, "pool", "segments")


@dataclasses.dataclass(frozen=True)
class Initial:
    """How the initial rows of a table are made.

    Attributes:
      kind: one of `KINDS`.
      a: the constant, the lower bound, or the mean.
      b: the upper bound or the standard deviation.
      seed: of the table, 64 bits.
      dtype: of the table's rows, to which initial rows are rounded.
      pool: how many rows a pool has, or 0.
      segments: of kind "segments": of each, in order, the column behind it, and its kind, a and b.
    """

    kind: str
    a: float
    b: float
    seed: int
    dtype: str
    pool: int = 0
    segments: tuple[tuple[int, str, float, float], ...] = ()

    @property
    def is_random(self) -> bool:
        """Whether elements are random, and so take long."""
        return any(kind not in ("constant", "pool") for _, kind, *_ in self.segments or ((0, self.kind),))

    def rows(self, xp: Any, keys: Any, hashes: Any, dim: int, pool: Any) -> Any:
        """Initial rows, not rounded yet.

        Args:
          xp: ``numpy`` or ``jax.numpy``.
          keys: ``(n,)`` uint64.
          hashes: ``(n,)`` uint64, of the keys.
          dim: width of a row.
          pool: ``(p, dim)`` float32, for a pool.

        Returns:
          ``(n, dim)`` float32.
        """
        if self.kind == "pool":
            return pool[_share(xp, hashes, self.pool)]
        segments = self.segments or ((dim, self.kind, self.a, self.b),)
        u, pieces, begin = None, [], 0
        for end, kind, a, b in segments:
            if kind == "constant":
                pieces.append(xp.full((*keys.shape, end - begin), a, xp.float32))
            else:
                u = (_words(xp, keys, dim, self.seed).astype(xp.float64) + 0.5) * 2.0**-32 if u is None else u
                pieces.append(_elements(xp, kind, a, b, u[..., begin:end]))
            begin = end
        return pieces[0] if len(pieces) == 1 else xp.concatenate(pieces, -1)


def _elements(xp: Any, kind: str, a: float, b: float, u: Any) -> Any:
    """Elements by a random distribution; u: float64 between 0 and 1, one for each."""
    if kind == "uniform":
        return (a + (b - a) * u).astype(xp.float32)
    if kind == "truncated_normal":
        u = 0.022750131948179195 + 0.95449973610364159 * u
    return (a + b * _inverse_normal(xp, u)).astype(xp.float32)


def _share(xp: Any, hashes: Any, rows: int) -> Any:
    """floor(hash / 2**64 * rows), of fewer than 2**32 rows."""
    half, n = xp.uint64(32), xp.uint64(rows)
    low = hashes & xp.uint64(0xFFFFFFFF)
    return ((((hashes >> half) * n) + (low * n >> half)) >> half).astype(xp.int64)


def _words(xp: Any, keys: Any, dim: int, seed: int) -> Any:
    """The random bits of each element: ``(n, dim)`` uint64 below 2**32."""
    low, half = xp.uint64(0xFFFFFFFF), xp.uint64(32)
    block = xp.arange(-(-dim // 4), dtype=xp.uint64)[None, :]
    zero = xp.zeros((*keys.shape, 1), xp.uint64) + xp.zeros_like(block)
    counter = [(keys & low)[..., None] + zero, (keys >> half)[..., None] + zero, block + zero, zero]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        c0, c1, c2, c3 = counter
        p0, p1 = c0 * xp.uint64(0xD2511F53), c2 * xp.uint64(0xCD9E8D57)
        counter = [(p1 >> half) ^ c1 ^ xp.uint64(k0), p1 & low, (p0 >> half) ^ c3 ^ xp.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return xp.stack(counter, -1).reshape(*keys.shape, 4 * block.shape[1])[..., :dim]


def _log(xp: Any, x: Any) -> Any:
    # frexp of numbers that are positive and normal; JAX's own loses 64 bits where x64 is on for a part of a program.
    bits = x.view(xp.uint64)
    exponent = (bits >> xp.uint64(52)).astype(xp.int64) - 1022
    m = ((bits & xp.uint64(2**52 - 1)) | xp.uint64(1022 << 52)).view(xp.float64)
    low = m < 0.70710678118654752440
    m, exponent = xp.where(low, m * 2.0, m), xp.where(low, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = xp.full_like(x, 1.0 / 17.0)
    for k in range(15, 0, -2):
        total = total * z + 1.0 / k
    return exponent.astype(xp.float64) * 0.69314718055994530942 + 2.0 * s * total


def _inverse_normal(xp: Any, p: Any) -> Any:
    q = p - 0.5
    r = 0.180625 - q * q
    middle = (
        q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179)
        / (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0)
    )  # fmt: skip
    r = xp.sqrt(-_log(xp, xp.where(q < 0, p, 1.0 - p))) - 1.6
    tail = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) / (
        (0.12021132975 * r + 0.73700164250) * r + 1.0
    )
    return xp.where(xp.abs(q) <= 0.425, middle, xp.where(q < 0, -tail, tail))
