"""Keys: any 64-bit id, exact whatever ``jax_enable_x64`` says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from kvjax._keys.counts import Counts, chosen, joined
from kvjax._keys.hashing import is_salts
from kvjax._keys.salt import salted
from kvjax._keys.shapes import check_index, check_joined, check_shape, shape_of
from kvjax._keys.words import integers_of, words_of
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._values.arrays import ArrayLike, HasArray
from kvjax._values.errors import fail
from kvjax._values.integers import NO_FLOATS, as_bits, salt_of
from kvjax._values.key_width import holds, is_narrow, narrow_error, x64_enabled


@jax.tree_util.register_pytree_node_class
class Keys:
    """An array of 64-bit keys that passes through ``jit``, ``scan`` and ``grad`` bit for bit.

    `kvjax.keys` makes them. `Keys` is a pytree with one leaf, ``words``: ``(..., 2)`` uint32, the low word first. A key
    is 64 bits, so -1 as int64 and 2**64 - 1 as uint64 are the same key. ``==`` and ``!=`` compare key by key,
    ``np.asarray(keys)`` returns int64 that is read-only, ``np.array(keys)`` a copy, and a conversion that would cut
    keys to fewer bits is a TypeError.

    Attributes:
      words: ``(..., 2)`` uint32, a NumPy array until a program takes it. `kvjax.keys` runs nothing in JAX, so the
        worker processes of a data loader may make keys.
      narrow: whether the keys come from a JAX array of 32-bit integers while ``jax_enable_x64`` is off, so that JAX may
        have cut ids of 64 bits. Tables refuse such keys, unless ``key_dtype="int32"`` or "uint32" says that the ids
        have 32 bits. A table that already has wider keys refuses them even then.
      has_salt: whether `salted` has made them, so that the padding id is now another key.
      counts: ``(...)`` int32, how often each key of a gradient occurred; None for other keys. A `SparseRows` made from
        these keys takes it. counts and has_salt are not part of the pytree, so programs do not know them for keys that
        they get as arguments.

    Example:
      >>> import kvjax
      >>> users = kvjax.keys([2**40 + 7, -1, 5])
      >>> users, users[:2] == users[1:]
      (Keys([1099511627783, -1, 5]), array([False, False]))
      >>> kvjax.Keys.concatenate([users, users]).reshape(2, 3)[1, 0]
      Keys(1099511627783)
    """

    __slots__ = ("counts", "has_salt", "narrow", "words")
    __array_ufunc__ = None  # NumPy's arrays leave comparisons to keys, and there is no arithmetic
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as of any array

    words: jax.Array
    narrow: bool
    has_salt: bool
    counts: Counts

    def __init__(self, words: Any, narrow: bool = False, has_salt: bool = False, counts: Counts = None) -> None:
        self.words, self.narrow, self.has_salt, self.counts = words, narrow, has_salt, counts

    def tree_flatten(self) -> tuple[tuple[Any], bool]:
        return (self.words,), self.narrow

    @classmethod
    def tree_unflatten(cls, narrow: bool, children: Sequence[Any]) -> Self:
        return cls(children[0], narrow)

    def with_words(self, words: ArrayLike) -> Keys:
        """Keys with other words ``(..., 2)`` uint32; everything else is as in these."""
        return Keys(words, self.narrow, self.has_salt, self.counts)

    @staticmethod
    def concatenate(parts: Sequence[Keys], axis: int = 0) -> Keys:
        """Joins keys along an axis.

        Args:
          parts: at least one `Keys`, of equal shapes except along the axis.
          axis: the axis along which to join.

        Returns:
          `Keys`.

        Raises:
          TypeError: there are no parts, or one is no `Keys`, or the axis is no integer.
          ValueError: they have no such axis, or their shapes differ in another one.

        Example:
          >>> import kvjax
          >>> kvjax.Keys.concatenate([kvjax.keys([[1], [2]]), kvjax.keys([[3], [4]])], axis=1)
          Keys([[1, 3],
                [2, 4]])
        """
        if not parts or not all(isinstance(part, Keys) for part in parts):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = [type(part).__name__ for part in parts]
            raise TypeError(f"kvjax: keys, concatenate: want several Keys, got {got}; make each by kvjax.keys")
        check_joined([part.shape for part in parts], axis)
        words: list[Any] = [part.words for part in parts]
        join = np.concatenate if all(isinstance(w, np.ndarray) for w in words) else jnp.concatenate
        counts = joined([(part.counts, part.shape) for part in parts], axis)
        whole: Any = join(words, axis if axis >= 0 else axis - 1)
        return Keys(whole, any(part.narrow for part in parts), all(part.has_salt for part in parts), counts)

    def where(self, condition: ArrayLike, other: KeysLike) -> Keys:
        """These keys where a condition holds, and others elsewhere.

        Args:
          condition: bool of a shape that broadcasts with these keys'.
          other: `Keys`, or whatever `kvjax.keys` takes, of such a shape.

        Returns:
          `Keys` of the shape of all three.

        Raises:
          TypeError: the condition is not bool, or `other` is not keys.
          ValueError: the shapes do not broadcast.

        Example:
          >>> import kvjax
          >>> kvjax.keys([2**40, 7]).where([True, False], -1)
          Keys([1099511627776, -1])
        """
        them = as_keys(other, "Keys.where")
        parts: Any = (self.words, them.words, condition)
        lib: Any = jnp if any(isinstance(part, jax.Array) for part in parts) else np
        holds = lib.asarray(condition)
        if holds.dtype != jnp.bool_:
            raise TypeError(f"kvjax: Keys.where: want a bool condition, got {holds.dtype}; compare it first")
        shape = (*shape_of(self.shape, them.shape, holds.shape), 2)

        def run(holds: Any, mine: Any, theirs: Any) -> Any:
            return (lib.where(*(lib.broadcast_to(x, shape) for x in (holds[..., None], mine, theirs))),), ()

        operands = holds, self.words, them.words
        words = run(*operands)[0][0] if lib is np else as_auto(run, sharding_of(self.words, self.ndim), *operands)[0][0]
        counts = chosen(holds, self.counts, them.counts, shape[:-1])
        return Keys(words, self.narrow or them.narrow, self.has_salt and them.has_salt, counts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape ``(...)`` of the keys, that of ``words`` without its last axis."""
        return tuple(self.words.shape[:-1])

    @property
    def ndim(self) -> int:
        """The number of axes of the keys; 0 for a single key."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of keys."""
        return math.prod(self.shape)  # symbolic where a program is exported

    def __len__(self) -> int:
        if not hasattr(self.words, "shape"):
            return 1  # of a tree of something else, which Flax asks for before it shows it
        if self.ndim == 0:
            raise TypeError("kvjax: Keys: len(): want keys (n, ...), got one key; int(key) gives its id")
        return self.shape[0]

    def __iter__(self) -> Iterator[Keys]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Keys:
        index = index if isinstance(index, tuple) else (index,)
        check_index(index, self.shape)
        counts = None if self.counts is None else self.counts[index]
        if any(i is Ellipsis for i in index):
            index = (*index, slice(None))
        words: Any = self.words
        if isinstance(words, np.ndarray) and any(isinstance(i, jax.Array) for i in index):
            words = jnp.asarray(words)  # the index may be traced
        return Keys(words[index], self.narrow, self.has_salt, counts)

    def __eq__(self, other: Any) -> Any:
        """Which keys are equal, ``(...)`` bool; `other` is anything that `kvjax.keys` takes, and is broadcast.

        Raises:
          TypeError: `other` is not integers; or JAX may have cut one of the two to 32 bits (see `narrow`) and not the
            other.
          ValueError: their shapes do not broadcast.
        """
        try:
            them = as_keys(other, "Keys, ==")
        except TypeError:
            if hasattr(other, "__array__") or isinstance(other, (int, float, list, tuple)):
                raise  # Python would compare objects, and give one False for all keys
            return NotImplemented
        if them.narrow != self.narrow:
            raise TypeError(
                "kvjax: Keys: want keys of one width on both sides of ==, got 64-bit ids and a JAX array of 32 bits "
                "while jax_enable_x64 is off, where JAX may have cut ids; compare with NumPy ids, or with "
                "kvjax.keys(array, key_dtype='int32') where its ids never had more bits"
            )
        theirs: Any = them.words
        shape = (*shape_of(self.shape, them.shape), 2)
        if isinstance(self.words, np.ndarray) and isinstance(theirs, np.ndarray):
            return (self.words == theirs).all(-1)
        return jnp.all(jnp.broadcast_to(self.words, shape) == jnp.broadcast_to(theirs, shape), -1)

    def __ne__(self, other: Any) -> Any:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else ~equal

    @property
    def dtype(self) -> np.dtype[np.int64]:
        """int64, as of ``np.asarray(keys)``."""
        return np.dtype(np.int64)

    def tolist(self) -> Ids:
        """The keys as signed Python integers in nested lists; for a single key, the integer.

        Raises:
          TypeError: the keys are traced by JAX.

        Example:
          >>> import kvjax, numpy as np
          >>> kvjax.keys(np.array([[2**63, 7]], np.uint64)).tolist(), kvjax.keys(7).tolist()
          ([[-9223372036854775808, 7]], 7)
        """
        return np.asarray(self).tolist()

    def __int__(self) -> int:
        if self.ndim != 0:
            raise TypeError(
                f"kvjax: Keys: int(): want one key, got keys of shape {self.shape}; keys.tolist() gives all"
            )
        return int(np.asarray(self))

    def ravel(self) -> Keys:
        """The same keys ``(size,)``.

        Example:
          >>> import kvjax
          >>> kvjax.keys([[1, 2], [3, 4]]).ravel()
          Keys([1, 2, 3, 4])
        """
        return self.reshape(-1)

    def reshape(self, *shape: int | Sequence[int]) -> Keys:
        """The same keys in another shape.

        Args:
          *shape: the new shape, as one tuple or as integers; one of them may be -1.

        Raises:
          ValueError, TypeError: the new shape has another number of keys, or is none.

        Example:
          >>> import kvjax
          >>> kvjax.keys([1, 2, 3, 4]).reshape(2, -1)
          Keys([[1, 2],
                [3, 4]])
        """
        sizes: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        check_shape(tuple(sizes), self.shape)
        if -1 in sizes:
            known = math.prod(s for s in sizes if s != -1)
            sizes = tuple(self.size // max(known, 1) if s == -1 else s for s in sizes)
        counts = None if self.counts is None else self.counts.reshape(sizes)
        return Keys(self.words.reshape(*sizes, 2), self.narrow, self.has_salt, counts)

    def salted(self, salt: int | HasArray | Sequence[int] | Keys) -> Keys:
        """Different keys for the same ids: features with different salts share a table, but no rows.

        For each salt this is a bijection of the keys, the same as in `kvjax.hash_keys`. It works inside ``jit``, too.

        Args:
          salt: 64-bit integer, for instance the number of the feature. Or a salt for each key: an array of integers of
            NumPy or JAX, also traced, that broadcasts to the keys, such as the type of each node. Salts of more than 32
            bits go into programs as `Keys`.

        Returns:
          `Keys` of the same shape: ``kvjax.keys(ids).salted(s)`` equals ``kvjax.keys(kvjax.hash_keys(ids, s))``. The
          padding id becomes another key, too, so an unsalted `pad_id` with these keys is an error: give a mask, give
          the layer the salt, or use ``kvjax.keys(pad_id).salted(s)``.

        Raises:
          TypeError: the salt is not an integer or an array of integers.
          ValueError: the salts do not broadcast to the keys.

        Example:
          >>> import kvjax, numpy as np
          >>> users, items = kvjax.keys([1, 2]).salted(0), kvjax.keys([1, 2]).salted(1)
          >>> bool((users != items).all())
          True
          >>> kvjax.keys([1, 2]).salted(np.array([0, 1])) == users
          array([ True, False])
        """
        return salted_keys(self, salt, "Keys.salted")

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        given = np.asarray(self.words)
        words = np.ascontiguousarray(given)
        if words.dtype == jax.dtypes.float0:  # of a derivative with respect to keys, which is nothing
            if dtype is None or np.dtype(dtype) == words.dtype:
                return np.zeros(self.shape, words.dtype)
            raise TypeError(
                f"kvjax: Keys: want keys, got a derivative with respect to keys, which is nothing (float0), for "
                f"{np.dtype(dtype)}; leave it out: differentiate with respect to other arguments"
            )
        array, same = words.view(np.int64).reshape(self.shape), dtype is None or np.dtype(dtype) == np.int64
        if copy is False and not (same and given.flags.c_contiguous):
            raise fail(
                ValueError, None, "Keys", "int64 of contiguous keys where copy=False", f"{dtype or array.dtype} that "
                "needs a copy", "leave copy out",
            )  # fmt: skip
        if same:
            array.flags.writeable = False  # as of JAX's arrays: these are the keys' own words
            return array.copy() if copy else array
        with np.errstate(invalid="ignore"):  # numbers that are none of int64 are found below
            cast = array.astype(dtype)
            exact = (cast.astype(np.int64) == array).all()
        if not exact:
            raise TypeError(
                f"kvjax: Keys: want a dtype that holds these keys, got {np.dtype(dtype)}; np.asarray(keys) gives int64"
            )
        return cast

    def __jax_array__(self) -> jax.Array:
        if not x64_enabled():
            raise TypeError(
                "kvjax: Keys: want JAX integers of 64 bits, got jax_enable_x64 off, where JAX would cut keys to 32; "
                "in programs keys == other compares, kvjax.Keys.concatenate joins, kvjax.keys([a, b]) stacks, and "
                "keys.where, keys.reshape and keys[...] are there; np.asarray(keys) takes them out"
            )
        return integers_of(self.words, jnp.int64)

    def __repr__(self) -> str:
        words: Any = self.words
        if isinstance(words, jax.Array) and not isinstance(words, Tracer):
            words = np.asarray(words) if words.is_fully_addressable and not words.is_deleted() else words
        if isinstance(words, np.ndarray) and words.dtype != jax.dtypes.float0:
            text = np.array2string(np.asarray(Keys(words)), separator=", ", prefix="Keys(", formatter={"int_kind": str})
            return f"Keys({text})"
        # Trees of shapes, types or specs hold something else.
        shape = getattr(words, "shape", None)
        return f"Keys({words!r})" if shape is None else f"Keys(shape={tuple(shape[:-1])})"


Ids: TypeAlias = int | list["Ids"]
KeysLike: TypeAlias = Keys | HasArray | int | Sequence["KeysLike"]
"""What is taken as keys ``(...)``: `Keys`, integers of NumPy or JAX, a Python int, or nested sequences of them.

All methods of `kvjax.Table`, `kvjax.lookup_bag` and the Flax modules take it; strings go through `kvjax.hash_keys`.
"""


def keys(ids: KeysLike, *, key_dtype: Literal["int64", "int32"] = "int64") -> Keys:
    """Makes `Keys` of integer ids, exactly.

    Args:
      ids: ``(...)`` integers: NumPy array, Python int or nested list (exact at 64 bits), a list of `Keys`, which are
        stacked, or a JAX array. Hash strings with `kvjax.hash_keys` first.
      key_dtype: "int32" says that the ids never had more than 32 bits, so that a JAX array of 32-bit integers has not
        been cut while ``jax_enable_x64`` is off. Without it such an array is an error, because ``jit`` and ``jnp`` cut
        NumPy's 64-bit ids to 32 bits.

    Returns:
      `Keys` of shape ``(...)``.

    Raises:
      TypeError: the ids are not integers, or integers of more than 64 bits, or JAX may have cut them.
      ValueError: `key_dtype` has another value; the ids are not an array; or two different ids in one list have the
        same 64 bits, such as -1 and 2**64 - 1.

    Example:
      >>> import kvjax, numpy as np
      >>> ids = kvjax.keys(np.array([2**40 + 7, -1]))
      >>> ids
      Keys([1099511627783, -1])
      >>> np.asarray(ids)
      array([1099511627783,            -1])
    """
    if key_dtype not in ("int64", "int32"):
        raise ValueError(f"kvjax: keys: want key_dtype 'int64' or 'int32', got {key_dtype!r}; choose one")
    made = as_keys(ids)
    if made.narrow and key_dtype == "int64":
        raise narrow_error("keys")
    return Keys(made.words, has_salt=made.has_salt, counts=made.counts)


def as_keys(ids: Any, where: str = "keys") -> Keys:
    """What every table operation does with its ``keys`` argument: `keys`, but remembering the width.

    `where` names the table and the operation in errors.
    """
    if isinstance(ids, Keys):
        words: Any = ids.words
        if getattr(words, "dtype", None) != jnp.uint32 or words.shape[-1:] != (2,):
            got = f"{getattr(words, 'shape', '')} {getattr(words, 'dtype', type(words).__name__)}".lstrip()
            raise TypeError(
                f"kvjax: {where}: want Keys of words (..., 2) uint32, got {got}: kvjax.Keys was given ids, of which "
                "kvjax.keys(ids) makes keys; or a map over leaves has taken the words for ids: compute on the ids "
                "before kvjax.keys(ids), or use the methods of Keys (reshape, ravel, where)"
            )
        return ids
    if isinstance(ids, jax.Array):
        return _from_jax(ids, where)
    if isinstance(ids, (list, tuple)) and any(isinstance(each, Keys) for each in ids):
        return _stacked([as_keys(each, where) for each in ids], where)
    if isinstance(ids, (list, tuple)) and holds(Tracer, ids):
        return _from_jax(jnp.asarray(ids), where)  # what a program gets of a list of numbers
    if isinstance(getattr(ids, "keys", None), Keys):
        raise TypeError(f"kvjax: {where}: want keys, got {type(ids).__name__}, which has keys; give its .keys")
    return Keys(as_bits(ids, where)[..., None].view(np.uint32), is_narrow(ids))


def salted_keys(keys: Keys, salt: Any, where: str) -> Keys:
    """`Keys.salted`; `where` is for errors."""
    many = isinstance(salt, Keys) or is_salts(salt)
    words = as_keys(salt, f"{where}, salt").words if many else salt_of(salt, where)
    return Keys(salted(keys.words, words, where), has_salt=True, counts=keys.counts)


def _stacked(parts: Sequence[Keys], where: str) -> Keys:
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"kvjax: {where}: want a sequence of keys of one shape, got {shapes}; kvjax.Keys.concatenate joins them"
        )
    return Keys.concatenate([part[None] for part in parts])


def _from_jax(ids: jax.Array, where: str) -> Keys:
    if 0 in ids.shape and jnp.issubdtype(ids.dtype, jnp.floating):
        ids = ids.astype(jnp.int16)  # JAX has given it the type of nothing
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        mend = NO_FLOATS if jnp.issubdtype(ids.dtype, jnp.floating) else "hash other values with kvjax.hash_keys"
        raise TypeError(f"kvjax: {where}: want integers, got {ids.dtype}; {mend}")
    if ids.dtype.itemsize == 8:
        return Keys(words_of(ids))
    narrow = is_narrow(ids)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        low = ids.astype(jnp.uint32)
        return Keys(jnp.stack([low, jnp.zeros_like(low)], -1), narrow)
    low = ids.astype(jnp.int32)
    return Keys(jax.lax.bitcast_convert_type(jnp.stack([low, low >> 31], -1), jnp.uint32), narrow)
