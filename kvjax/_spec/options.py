"""Options: what a table is made with. A new option is one entry here, and what it does.

An entry has its name and type, its default, how a value is checked and resolved, and whether checkpoints keep it. The
signature of `kvjax.get_table`, the fields of the Flax layers, `TableSpec` and what a checkpoint says of a table are
derived from the entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from kvjax import constraints
from kvjax._values.arguments import is_integer, is_name
from kvjax._values.dtypes import dtype_name, row_dtype
from kvjax._values.errors import fail, meant
from kvjax._values.key_width import KEY_DTYPES
from kvjax._values.slot_layout import type_text
from kvjax.admit import Admission
from kvjax.evict import Every, Policy
from kvjax.ffi import host
from kvjax.initializers import InitializerLike, resolve
from kvjax.storage import Storage

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

OnFull: TypeAlias = Literal["grow", "evict", "error"]
Count: TypeAlias = Literal["occurrences", "batch"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
ON_FULL, COUNTS, ROUNDINGS = map(get_args, (OnFull, Count, Rounding))


class Request:
    """What is asked of a table: its name and dim, and the options that are resolved so far, by name."""

    def __init__(self, name: Any, op: str, dim: Any) -> None:
        self.name, self.op, self.options = name, op, dict[str, Any]()
        self.want(is_name(name), "a name in UTF-8 that is not empty", name)
        whole = isinstance(dim, float) and dim.is_integer() and 1 <= dim <= host.MAX_DIM
        mend = f"give dim={int(dim)}" if whole else "give the width of a row"
        self.want(is_integer(dim) and 1 <= dim <= host.MAX_DIM, f"an integer dim in 1..{host.MAX_DIM}", dim, mend)
        self.dim = int(dim)

    def want(self, ok: Any, what: str, got: Any, mend: str = "see kvjax.get_table") -> None:
        if not ok:
            raise fail(ValueError, self.name, self.op, what, repr(got), mend)

    def want_one(self, option: str, choices: tuple[str, ...], got: Any) -> None:
        """Whether an option is one of its choices."""
        if got not in choices:
            self.want(False, f"{option} in {choices}", got, meant(got, choices) + "choose one")

    def resolve(self, option: str, value: Any) -> None:
        """Takes a value for an option, after those that stand before it.

        Raises:
          ValueError, TypeError: it is out of range.
        """
        self.options[option] = ENTRIES[option].metadata["resolve"](self, value)

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


def option(default: Any, resolve: Callable[[Request, Any], Any], saved: str | None = None) -> Any:
    """One entry of `Options`.

    Args:
      default: what it is if nobody says it.
      resolve: from a request and a value to what `TableSpec` holds; may look at options that stand before it.
      saved: where checkpoints keep it, so that a restore can make the table anew: among the "fields" of a table, among
        its "rules", or nowhere, because it is of the process.
    """
    return dataclasses.field(default=default, metadata={"resolve": resolve, "saved": saved})


def _key_dtype(request: Request, dtype: Any) -> str:
    dtype = dtype_name(dtype)
    mend = "leave it out for any key of 64 bits; strings become keys by kvjax.hash_keys"
    request.want(dtype in KEY_DTYPES, f"key_dtype in {KEY_DTYPES}", dtype, mend)
    return dtype


def _dtype(request: Request, dtype: Any) -> str:
    return row_dtype(dtype, request.name, request.op)


def _initializer(request: Request, initializer: Any) -> Any:
    try:
        return resolve(initializer, request.dim, request["dtype"])
    except (TypeError, ValueError) as error:
        told = str(error).removeprefix("kvjax: ")
        raise type(error)(f"kvjax: table {request.name!r}, {request.op}: {told}") from error


def _seed(request: Request, seed: Any) -> int:
    fits = seed is None or (is_integer(seed) and -(2**63) <= seed < 2**64)
    mend = (
        "see kvjax.get_table" if is_integer(seed) else "give an int, such as the one that a key of JAX's was made from"
    )
    request.want(fits, "an integer seed of at most 64 bits", seed, mend)
    return (int(host.hash_strings([request.name.encode()], 0)[0]) if seed is None else int(seed)) % 2**64


def _bool(option: str) -> Callable[[Request, Any], bool]:
    def resolve(request: Request, value: Any) -> bool:
        request.want(isinstance(value, (bool, np.bool_)), f"{option} True or False", value)
        return bool(value)

    return resolve


def _capacity(request: Request, n: Any) -> int:
    fits = n is None or (is_integer(n) and 0 <= n < 2**32 - 1)
    request.want(fits, "capacity in 0..2**32 - 2 or None", n)
    return int(n or 0)


def _max_capacity(request: Request, n: Any) -> int | None:
    fits = n is None or (is_integer(n) and 0 < n < 2**32 - 1)
    request.want(fits, "max_capacity in 1..2**32 - 2 or None", n)
    return None if n is None else int(n)


def _on_full(request: Request, on_full: Any) -> str:
    request.want_one("on_full", ON_FULL, on_full)
    limit = request["max_capacity"]
    request.want(on_full == "grow" or limit, f"max_capacity beside on_full={on_full!r}", limit)
    capacity = request.options.get("capacity", 0)  # of which a checkpoint says nothing
    fits = on_full == "grow" or capacity <= limit
    request.want(fits, f"capacity of at most max_capacity={limit} beside on_full={on_full!r}", capacity)
    return on_full


def _admit(request: Request, admit: Any) -> Admission | None:
    request.want(admit is None or isinstance(admit, Admission), "an admission of kvjax.admit or None", admit)
    return admit


def _evict(request: Request, evict: Any) -> Policy | Every | None:
    on_full = request["on_full"]
    request.want(evict is None or isinstance(evict, (Policy, Every)), "a policy of kvjax.evict or None", evict)
    runs = evict is None or isinstance(evict, Every) or on_full == "evict"
    request.want(runs, "evict=policy.every(steps), or on_full='evict': else it would never run", evict)
    timed = isinstance(evict, Every) and on_full != "evict" and evict.policy.needs_number()
    request.want(not timed, "a number of rows for what is evicted every so many steps", evict)
    return evict


def _count(request: Request, count: Any) -> str:
    request.want_one("count", COUNTS, count)
    return count


def _storage(request: Request, storage: Any) -> Storage:
    what = "one of kvjax.storage (Device(), External(engine), Host(), Hybrid(bytes), Mmap(path))"
    mend = "leave it out for memory, or give kvjax.storage.Mmap('/a/folder') for rows on a disk"
    request.want(isinstance(storage, Storage), what, storage, mend)
    return storage


def _rounding(request: Request, rounding: Any) -> str:
    request.want_one("rounding", ROUNDINGS, rounding)
    exact = request["dtype"] == "float32"
    mend = "leave it out, or give dtype='bfloat16' (to a layer of Flax param_dtype='bfloat16')"
    request.want(rounding == "nearest" or not exact, "rounding='nearest' for rows of float32", rounding, mend)
    return rounding


def _constraint(request: Request, constraint: Any) -> Callable[[Any], Any] | None:
    if constraint is not None and type(constraint) not in constraints.RULES.values():
        row = type_text(np.float32, (request.dim,))
        got = type_made(constraint, constraint, np.zeros(request.dim, np.float32))
        if got == row:  # all rows of a step are given to it by vmap
            import jax

            many = type_made(constraint, jax.vmap(constraint), np.zeros((2, request.dim), np.float32))
            got = row if many == type_text(np.float32, (2, request.dim)) else f"under vmap {many}"
        request.want(got == row, f"constraint: a function {row} -> {row}", got)
    return constraint


def type_made(option: object, function: Callable[..., Any], *args: Any) -> str:
    """What a function of an option makes of arguments, as "float32[8]"; or the error that it raises."""
    import jax

    try:
        hash(option)  # it is part of what compiled programs are found by
        out = jax.eval_shape(function, *args)
        return type_text(out.dtype, out.shape)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@dataclasses.dataclass(kw_only=True, repr=False)
class Options:
    """The options of a table, as users give them; `kvjax.get_table` says what each means."""

    # Not frozen, because Linen's modules, which have these as fields, are not.
    key_dtype: DTypeLike = option("int64", _key_dtype, saved="fields")
    dtype: DTypeLike = option("float32", _dtype, saved="fields")
    initializer: InitializerLike = option(0.0, _initializer, saved="fields")
    seed: int | None = option(None, _seed, saved="fields")
    trainable: bool = option(True, _bool("trainable"), saved="fields")
    checkpoint: bool = option(True, _bool("checkpoint"))
    capacity: int | None = option(None, _capacity)
    max_capacity: int | None = option(None, _max_capacity, saved="rules")
    on_full: OnFull = option("grow", _on_full, saved="rules")
    admit: Admission | None = option(None, _admit, saved="rules")
    evict: Policy | Every | None = option(None, _evict, saved="rules")
    count: Count = option("occurrences", _count, saved="rules")
    storage: Storage | None = option(None, _storage)
    rounding: Rounding = option("nearest", _rounding, saved="fields")
    constraint: Callable[[jax.Array], jax.Array] | None = option(None, _constraint, saved="rules")


ENTRIES = {field.name: field for field in dataclasses.fields(Options)}
"""The entries by name."""


def saved_as(kind: str) -> tuple[str, ...]:
    """Names of the options that checkpoints keep among the "fields" or among the "rules"."""
    return tuple(name for name, entry in ENTRIES.items() if entry.metadata["saved"] == kind)
