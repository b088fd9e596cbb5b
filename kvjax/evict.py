"""Eviction policies: rules that choose the rows to remove.

A policy is applied by hand (`Table.evict`), every so many steps (`Policy.every`), or when a table is full
(``on_full="evict"``); the last two are arguments of `kvjax.get_table`. Policies combine with ``&``, ``|`` and ``~``. A
hash of the key breaks ties, so the rows that survive do not depend on the order in which keys came. Pinned rows and, in
a training step, the rows of the batch are never chosen. A sharded table chooses among the rows of all shards, and keeps
the rows that it would keep in one place.

Example:
  >>> import kvjax
  >>> kvjax.evict.MaxAge(1000) & ~kvjax.evict.MinNorm(0.1) | kvjax.evict.LeastFrequent(10)
  MaxAge(1000) & ~MinNorm(0.1) | LeastFrequent(10)
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np

from kvjax._process import PROCESS
from kvjax._values.arguments import integer_in, is_real
from kvjax._values.errors import check_choice
from kvjax._values.exported import Exported

__all__ = [
    "Every",
    "LeastFrequent",
    "LeastRecent",
    "LowestScore",
    "MaxAge",
    "MinFrequency",
    "MinNorm",
    "MinScore",
    "Policy",
]


def __dir__() -> list[str]:
    return sorted(__all__)


Score = Callable[[Exported], np.ndarray]


class Policy(abc.ABC):
    """A rule that chooses rows; made by the classes of `kvjax.evict` and their combinations.

    Raises:
      TypeError: in ``&`` and ``|``: the other is not a policy, or already has a period; in ``and``, ``or`` and ``not``:
        always.

    Example:
      >>> import kvjax
      >>> (kvjax.evict.MaxAge(1000) | kvjax.evict.MinFrequency(2)).every(100)
      (MaxAge(1000) | MinFrequency(2)).every(100)
    """

    def __and__(self, other: Policy) -> Policy:
        return _Both("and", self, _policy(other))

    def __or__(self, other: Policy) -> Policy:
        return _Both("or", self, _policy(other))

    def __invert__(self) -> Policy:
        return _Not(self)

    def __bool__(self) -> bool:
        raise TypeError(f"kvjax: evict: want & | ~ between policies, got `and`, `or` or `not` beside {self!r}")

    def every(self, steps: int) -> Every:
        """This policy, applied by the training write whenever the step passes a multiple of `steps`.

        Args:
          steps: 1 or more.

        Returns:
          What `kvjax.get_table` takes as ``evict``.

        Raises:
          ValueError: `steps` is not an integer from 1 to 2**63 - 1.

        Example:
          >>> import kvjax, numpy as np, optax, jax.numpy as jnp
          >>> policy = kvjax.evict.MaxAge(1).every(3)
          >>> table = kvjax.get_table("doc_every", dim=1, evict=policy)
          >>> for key in [5, 6, 6]:
          ...     table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))))
          >>> table.export().keys.tolist()
          [6]
          >>> kvjax.drop_table("doc_every")
        """
        return Every(self, steps)

    @abc.abstractmethod
    def formula(self) -> str:
        """The rule in reverse Polish notation, as the C++ side reads it."""

    def alternatives(self) -> list[Policy]:
        """The parts whose union this is; rows are counted by the first part that chooses them."""
        return [self]

    def reasons(self) -> list[str]:
        """By what name rows are counted that an alternative chooses; each is one line."""
        return [" ".join(repr(part).split()) for part in self.alternatives()]

    def text(self) -> str:
        """All alternatives, as the C++ side reads them: a reason and a formula."""
        parts = zip(self.reasons(), self.alternatives(), strict=True)
        return "\n".join(f"{reason}\n{part.formula()}" for reason, part in parts)

    def needs_number(self) -> bool:
        """Whether a ranking in it takes its number from the space that is needed."""
        return "needed" in self.formula().replace(":", " ").split()

    def calls_python(self) -> bool:
        """Whether a score function of the user is in it."""
        return self._has("min_score", "lowest_score")

    def reads_rows(self) -> bool:
        """Whether it judges rows by their values, or a function of the user's may."""
        return self.calls_python() or self._has("min_norm")

    def limits_age(self) -> bool:
        """Whether rows may be chosen because they have not been written for some steps."""
        return self._has("max_age")

    def _has(self, *names: str) -> bool:
        return any(word.split(":")[0] in names for word in self.formula().split())


@dataclasses.dataclass(frozen=True)
class Every:
    """A policy with a period; see `Policy.every`.

    Attributes:
      policy: the rule, without a period.
      steps: 1 or more, the steps of training from one eviction to the next.

    Raises:
      TypeError: `policy` is not a policy, or has a period already.
      ValueError: `steps` is not an integer from 1 to 2**63 - 1.

    Example:
      >>> import kvjax
      >>> every = kvjax.evict.MaxAge(1000).every(100)
      >>> every.policy, every.steps
      (MaxAge(1000), 100)
    """

    policy: Policy
    steps: int

    def __post_init__(self) -> None:
        _policy(self.policy)
        good = integer_in(1, 2**63 - 1)(self.steps)
        check_choice(self, good, "an integer of steps >= 1 and below 2**63", self.steps)
        object.__setattr__(self, "steps", int(self.steps))

    def __and__(self, other: Any = None) -> Policy:
        return _policy(self)  # raises

    __rand__ = __or__ = __ror__ = __invert__ = __and__

    def __repr__(self) -> str:
        inner = f"({self.policy!r})" if isinstance(self.policy, (_Both, _Not)) else repr(self.policy)
        return f"{inner}.every({self.steps})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Leaf(Policy):
    def __repr__(self) -> str:
        shown, by_name = [], ""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                by_name = "="  # what follows cannot go by its place
            else:
                name = field.name + by_name if by_name else ""
                shown.append(name + str(getattr(value, "__qualname__", value)))
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class MaxAge(_Leaf):
    """Rows that have not been written for more than so many steps.

    Attributes:
      steps: 0 or more. The age of a row is the current step minus its row version.

    Raises:
      ValueError: `steps` is not an integer from 0 to 2**63 - 1.

    Source: DeepRec's GlobalStepEvict, the time to live of FBGEMM's EvictionPolicy.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_max_age", dim=1).upsert(np.arange(3), np.ones((3, 1)))
      >>> len(table.evict(kvjax.evict.MaxAge(5), step=6))
      0
      >>> kvjax.drop_table("doc_max_age")
    """

    steps: int

    def __post_init__(self) -> None:
        check_choice(self, _is_count(self.steps), "an integer of steps >= 0 and below 2**63", self.steps)

    def formula(self) -> str:
        return f"max_age:{int(self.steps)}"


@dataclasses.dataclass(frozen=True, repr=False)
class MinFrequency(_Leaf):
    """Rows whose key has occurred in training less than so often.

    Attributes:
      count: occurrences.

    Raises:
      ValueError: `count` is not an integer from 0 to 2**63 - 1.

    Source: the counter of FBGEMM's EvictionPolicy.

    Example:
      >>> import kvjax
      >>> kvjax.evict.MinFrequency(2) & kvjax.evict.MaxAge(1000)
      MinFrequency(2) & MaxAge(1000)
    """

    count: int

    def __post_init__(self) -> None:
        check_choice(self, _is_count(self.count), "an integer count >= 0 and below 2**63", self.count)

    def formula(self) -> str:
        return f"min_frequency:{int(self.count)}"


@dataclasses.dataclass(frozen=True, repr=False)
class MinNorm(_Leaf):
    """Rows whose Euclidean norm is less than this, or not a number.

    Attributes:
      norm: 0 or more. DeepRec's L2WeightEvict(t) compares half the squared norm, so it is ``MinNorm(sqrt(2 * t))``.

    Raises:
      ValueError: `norm` is not a number of 0 or more.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_min_norm", dim=2).upsert(np.arange(2), [[3.0, 4.0], [0.1, 0.0]])
      >>> table.evict(kvjax.evict.MinNorm(1.0)).export().keys.tolist()
      [0]
      >>> kvjax.drop_table("doc_min_norm")
    """

    norm: float

    def __post_init__(self) -> None:
        check_choice(self, is_real(self.norm) and self.norm >= 0, "norm >= 0", self.norm)

    def formula(self) -> str:
        return f"min_norm:{float(self.norm)!r}"


@dataclasses.dataclass(frozen=True, repr=False)
class LeastRecent(_Leaf):
    """The n rows that were written longest ago.

    Attributes:
      n: rows. None, which only works for full tables, evicts as many rows as new ones need space. With a number, n rows
        are evicted at once (more if a step needs more), and the next ones after n new rows; on a GPU this saves time.

    Raises:
      ValueError: `n` is not an integer of 0 or more.

    Source: LRU, as of HierarchicalKV and TorchRec.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> table = kvjax.get_table("doc_lru", dim=1, max_capacity=2, on_full="evict")
      >>> for key in [1, 2, 1, 3]:
      ...     table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))))
      >>> sorted(table.export().keys.tolist()), table.stats().evicted
      ([1, 3], {'capacity': 1})
      >>> kvjax.drop_table("doc_lru")
    """

    n: int | None = None

    def __post_init__(self) -> None:
        _check_number(self)

    def formula(self) -> str:
        return f"least_recent:{_rows(self.n)}"


@dataclasses.dataclass(frozen=True, repr=False)
class LeastFrequent(_Leaf):
    """The n rows whose keys have occurred least often.

    Attributes:
      n: rows; None as for `LeastRecent`.
      half_life: steps after which a frequency counts half, from the step that last wrote the row; None for never.

    Raises:
      ValueError: `n` is not an integer of 0 or more, or `half_life` is not above 0.

    Source: LFU, as of HierarchicalKV and TorchRec.

    Example:
      >>> import kvjax
      >>> kvjax.evict.LeastFrequent(half_life=1000.0)
      LeastFrequent(half_life=1000.0)
    """

    n: int | None = None
    half_life: float | None = None

    def __post_init__(self) -> None:
        _check_number(self)
        half_life = self.half_life
        check_choice(self, half_life is None or (is_real(half_life) and half_life > 0), "half_life > 0", half_life)

    def formula(self) -> str:
        return f"least_frequent:{_rows(self.n)}:{float(self.half_life or 0)!r}"


@dataclasses.dataclass(frozen=True, repr=False)
class MinScore(_Leaf):
    """Rows to which your function gives a score below a bound.

    Attributes:
      bound: the least score that stays.
      score: function from `Exported` rows to ``(n,)`` finite numbers, which are compared as float64. It runs on the
        host and takes and returns NumPy arrays. It is called with up to 65,536 rows at a time, in no particular order,
        and must score each row by itself. Define it once, at the top of a module: kvjax keeps every function, and
        programs are compiled for each.

    Raises:
      ValueError: `bound` is not a number, or `score` is not a function.

    Example:
      >>> import kvjax, numpy as np
      >>> def mean(rows):
      ...     return rows.values.mean(axis=1)
      >>> table = kvjax.get_table("doc_min_score", dim=1).upsert(np.arange(4), np.arange(4.0)[:, None])
      >>> sorted(table.evict(kvjax.evict.MinScore(1.5, mean)).export().keys.tolist())
      [2, 3]
      >>> kvjax.drop_table("doc_min_score")
    """

    bound: float
    score: Score

    def __post_init__(self) -> None:
        check_choice(self, is_real(self.bound), "a number", self.bound)
        check_choice(self, callable(self.score), "a score function", self.score)

    def formula(self) -> str:
        return f"min_score:{float(self.bound)!r}:{_name(self.score)}"


@dataclasses.dataclass(frozen=True, repr=False)
class LowestScore(_Leaf):
    """The n rows to which your function gives the lowest scores.

    Attributes:
      n: rows; None as for `LeastRecent`.
      score: see `MinScore`.

    Raises:
      ValueError: `n` is not an integer of 0 or more, or `score` is not a function.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_score", dim=1).upsert(np.arange(4), np.arange(4.0)[:, None])
      >>> table = table.evict(kvjax.evict.LowestScore(2, lambda rows: rows.values[:, 0]))
      >>> sorted(table.export().keys.tolist())
      [2, 3]
      >>> kvjax.drop_table("doc_score")
    """

    n: int | None
    score: Score

    def __post_init__(self) -> None:
        _check_number(self)
        check_choice(self, callable(self.score), "a score function", self.score)

    def formula(self) -> str:
        return f"lowest_score:{_rows(self.n)}:{_name(self.score)}"


@dataclasses.dataclass(frozen=True, repr=False)
class _Both(Policy):
    op: str
    left: Policy
    right: Policy

    def __post_init__(self) -> None:
        check_choice(self, self.op in ("and", "or"), "'and' or 'or' between policies", self.op)
        _policy(self.left)
        _policy(self.right)

    def formula(self) -> str:
        return f"{self.left.formula()} {self.right.formula()} {self.op}"

    def alternatives(self) -> list[Policy]:
        return self.left.alternatives() + self.right.alternatives() if self.op == "or" else [self]

    def __repr__(self) -> str:
        if self.op == "or":
            return f"{self.left!r} | {self.right!r}"
        sides = (f"({p!r})" if isinstance(p, _Both) and p.op == "or" else repr(p) for p in (self.left, self.right))
        return " & ".join(sides)


@dataclasses.dataclass(frozen=True, repr=False)
class _Not(Policy):
    inner: Policy

    def __post_init__(self) -> None:
        _policy(self.inner)

    def formula(self) -> str:
        return f"{self.inner.formula()} not"

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, _Both) else f"~{self.inner!r}"


RULES: dict[str, type[Policy | Every]] = {
    kind.__name__: kind
    for kind in (Every, LeastFrequent, LeastRecent, LowestScore, MaxAge, MinFrequency, MinNorm, MinScore, _Both, _Not)
}
"""What checkpoints hold of policies, by name."""


def policy_of(evict: Policy | Every | None) -> Policy | None:
    """What a table's ``evict`` chooses rows by, whenever it does."""
    return evict.policy if isinstance(evict, Every) else evict


RANKINGS = {"version": "least_recent:-{}", "frequency": "least_frequent:-{}:0"}
"""The rankings of `Table.restrict`, with the number of rows that stay instead of those that are evicted."""


def all_but(n: int, by: str) -> str:
    """The policy of `Table.restrict` as the C++ side reads it: all rows but the n that rank highest."""
    return f"restrict\n{RANKINGS[by].format(n)}"


def _policy(x: Any) -> Policy:
    if not isinstance(x, Policy):
        raise TypeError(f"kvjax: evict: want a policy of kvjax.evict, got {x!r}; .every(...) comes last")
    return x


def _check_number(ranking: LeastRecent | LeastFrequent | LowestScore) -> None:
    n = ranking.n
    check_choice(ranking, n is None or _is_count(n), "an integer n >= 0 or None", n)


_is_count = integer_in(0, 2**63 - 1)


def _rows(n: int | None) -> str:
    return "needed" if n is None else str(int(n))


def _name(score: Score) -> str:
    named = f"{getattr(score, '__module__', '')}.{getattr(score, '__qualname__', type(score).__name__)}"
    return PROCESS.name_score(quote(named, safe=""), score)
