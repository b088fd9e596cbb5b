"""`kvjax.export`, and the program that it makes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from kvjax._export.used import TableUse, check, used_by
from kvjax._formats.errors import needed
from kvjax._lookup.readable import FrozenReadable
from kvjax._process import PROCESS
from kvjax._table.registry import tables
from kvjax._table.table import Table, is_table
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import PyTree
from kvjax._values.slot_layout import type_text
from kvjax.ffi import DEVICE, HOST

_MAGIC = b"kvjaxPG1"
_HEAD = struct.Struct("<8sIII")

Shapes = str | None | Sequence[PyTree]


class ProgramError(ValueError):
    """Bytes that are not an exported program, or arguments that do not fit the program.

    Example:
      >>> import kvjax
      >>> try:
      ...     kvjax.Program.deserialize(b"something else")
      ... except kvjax.ProgramError as error:
      ...     print(str(error).split(",")[0])
      kvjax: program
    """


class Program:
    """A compiled function of tables and arrays, which runs without the code that it was made from.

    Tables are found by name in the process that calls it. Each call reads the newest finished version, as through
    `Table.live`. All other values are arguments of each call.

    Attributes:
      tables: what the program expects of each table, by name.
      inputs: path and type of each array among the arguments, "0/params/kernel" and "float32[b,3]".
      platforms: on which it runs.
      exported: the ``jax.export.Exported``, whose arguments are the arrays of `inputs`.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_program", dim=2).upsert([7], [[1.0, 2.0]])
      >>> def read(table, keys):
      ...     return table.lookup(keys)
      >>> program = kvjax.export(read, table, kvjax.keys([7]), shapes=(None, "b, ..."))
      >>> program.inputs
      {'1/0': 'uint32[b,2]'}
      >>> program(None, kvjax.keys([7, 8])).tolist()
      [[1.0, 2.0], [0.0, 0.0]]
      >>> kvjax.drop_table("doc_program")
    """

    def __init__(
        self, exported: jax.export.Exported, uses: dict[str, TableUse], paths: Sequence[str], frozen: dict[str, str],
        places: dict[str, str],
    ) -> None:  # fmt: skip
        """For `export` and `deserialize`."""
        self.exported, self.tables, self._frozen, self._places = exported, uses, frozen, places
        # Of a bare `exported.call` JAX keeps an executable for each object and shape as long as the process lives. What
        # this compiles goes with the program.
        self._call = jax.jit(exported.call)
        self.inputs = {path: str(aval.str_short()) for path, aval in zip(paths, exported.in_avals, strict=True)}
        self.platforms = tuple(exported.platforms)

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the program.

        Args:
          *args: as for the function. The places of tables may have any handle of the same table, what
            `kvjax.orbax.split` leaves there, or None.

        Returns:
          What the function returned.

        Raises:
          KeyError, ValueError: a table of the program is not in the process, or has another dim, dtype or seed.
          ProgramError: arguments are missing, or have other types, or another table is in the place of one.
        """
        check(self.tables, tables(), "call")
        PROCESS.traced.update(self.tables)
        for path, name in _places(args).items():
            if name != (wanted := self._places.get(path, name)):
                raise ProgramError(
                    f"kvjax: program, call: want table {wanted!r} at {path!r}, which it finds by this name, got table "
                    f"{name!r}; export the program again for this table, or give None to read {wanted!r}"
                )
        for path, said in _frozen(args).items():
            if said != self._frozen.get(path, said):
                raise ProgramError(
                    f"kvjax: program, call: want the frozen table that it was exported with at {path}, "
                    f"{self._frozen[path]}, got {said}; export the program again for each frozen table, or with "
                    "FrozenTable.as_jax(capacity=) and give releases with the same capacity"
                )
        found = dict(_arrays(args))
        if found.keys() != self.inputs.keys():
            missing, extra = sorted(self.inputs.keys() - found.keys()), sorted(found.keys() - self.inputs.keys())
            mend = "give arguments of the structure that it was exported with, and kvjax.keys(ids) where it had keys"
            if missing and self.tables:
                mend += "; in the place of a table give None, or the handle"
            want, got = f"no arrays at {_some(extra)}", "some there"
            if missing:
                want, got = f"arrays at {_some(missing)}", "none there"
                got += f" and others at {_some(extra)}" if extra else ""
            raise ProgramError(f"kvjax: program, call: want {want}, got {got}; {mend}")
        try:
            return self._call(*(found[path] for path in self.inputs))
        except (ValueError, TypeError) as error:
            paths = list(self.inputs)  # JAX knows them by their numbers
            said = re.sub(r"\bargs\[(\d+)\]", lambda found: repr(paths[int(found[1])]), str(error))
            inputs = list(zip(paths, self.exported.in_avals, strict=True))
            empty = [path for path, aval in inputs if 0 in np.shape(found[path]) and 0 not in aval.shape]
            others = [path for path, aval in inputs if not _fits(aval, found[path])]
            want, got = "arrays that fit each other and `Program.inputs`", f"{said:.600}"
            if others:
                want = _some([f"{path}: {self.inputs[path]}" for path in others])
                got = _some([f"{path}: {_type_of(found[path])}" for path in others])
            mend = f"pad an empty batch ({', '.join(empty)}), or do not call" if empty else "give arrays of these types"
            raise ProgramError(f"kvjax: program, call: want {want}, got {got}; {mend}") from error

    def serialize(self) -> bytes:
        """The program as bytes, for `deserialize`. Needs flatbuffers (``pip install kvjax[export]``).

        Raises:
          ImportError: flatbuffers is not installed.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_serialize", dim=1).upsert([7], [[1.0]])
          >>> data = kvjax.export(lambda keys, table: table.lookup(keys), kvjax.keys([7]), table).serialize()
          >>> type(data).__name__, data[:8]
          ('bytes', b'kvjaxPG1')
          >>> kvjax.drop_table("doc_serialize")
        """
        needed("flatbuffers", "Program.serialize", "export")
        about: dict[str, Any] = {"tables": {name: dataclasses.asdict(use) for name, use in self.tables.items()}}
        about |= {"inputs": list(self.inputs), "frozen": self._frozen, "places": self._places}
        head = json.dumps(about).encode()
        body = bytes(self.exported.serialize())
        return _HEAD.pack(_MAGIC, len(head), len(body), zlib.crc32(head + body)) + head + body

    @classmethod
    def deserialize(cls, data: bytes) -> Program:
        """Makes a program from the bytes of `serialize`, in any process. Its tables need not exist yet.

        A program is code: take it, and pickles of it, only from those whose code you would run. Damage is found by a
        checksum, and bytes that somebody has forged may end the process in JAX's reader of modules.

        Args:
          data: the bytes.

        Raises:
          ProgramError: the bytes are not a program, are damaged, or come from a newer JAX.
          TypeError: `data` is not bytes.
          ImportError: flatbuffers is not installed.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_deserialize", dim=1).upsert([7], [[1.0]])
          >>> data = kvjax.export(lambda keys, table: table.lookup(keys), kvjax.keys([7]), table).serialize()
          >>> kvjax.Program.deserialize(data)(kvjax.keys([7]), None).tolist()
          [[1.0]]
          >>> kvjax.drop_table("doc_deserialize")
        """
        if not isinstance(cast("object", data), (bytes, bytearray, memoryview)):
            raise TypeError(
                f"kvjax: program, deserialize: want the bytes that Program.serialize returned, got "
                f"{type(data).__name__}; of a file they are Path(...).read_bytes()"
            )
        data = bytes(data)
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
            raise ProgramError(
                f"kvjax: program, deserialize: want bytes that begin with {_MAGIC!r}, got {data[:8]!r}; give "
                "what Program.serialize returned"
            )
        _, length, size, digest = _HEAD.unpack_from(data)
        rest = data[_HEAD.size :]
        if len(rest) != length + size or zlib.crc32(rest) != digest:
            raise ProgramError(
                f"kvjax: program, deserialize: want {length + size} bytes of CRC-32 {digest:08x}, got {len(rest)} of "
                f"{zlib.crc32(rest):08x}; the program is damaged: export it again"
            )
        needed("flatbuffers", "Program.deserialize", "export")
        try:
            exported = jax.export.deserialize(bytearray(rest[length:]))
            with mlir.make_ir_context():  # or JAX reads the module, and refuses that of a newer one, at the first call
                exported.mlir_module(serialized=False)
        except Exception as error:
            raise ProgramError(
                f"kvjax: program, deserialize: want a program that jax {jax.__version__} reads, got {error!s:.300}; "
                "export it with this version of JAX, or an older one"
            ) from error
        return cls(exported, *_described(rest[:length], len(exported.in_avals)))

    def __reduce__(self) -> Any:
        return Program.deserialize, (self.serialize(),)

    def __repr__(self) -> str:
        return f"Program(tables={list(self.tables)}, inputs={self.inputs}, platforms={self.platforms})"


def _described(head: bytes, inputs: int) -> tuple[dict[str, TableUse], list[str], dict[str, str], dict[str, str]]:
    """What the bytes of a program say of its tables, its inputs, its frozen tables and the places of its tables.

    Args:
      head: in JSON.
      inputs: how many arrays the program takes.

    Raises:
      ProgramError: it is something else.
    """
    try:
        about = json.loads(head)
        uses = {name: TableUse(**use) for name, use in about["tables"].items()}
        paths, frozen, places = about["inputs"], about.get("frozen", {}), about.get("places", {})  # early ones: none
        good = isinstance(paths, list) and len(set(paths)) == len(paths) == inputs
        good = good and all(
            isinstance(text, str) for text in [*paths, *frozen, *frozen.values(), *places, *places.values()]
        )
        for use in uses.values():
            good = good and is_integer(use.dim) and isinstance(cast("object", use.dtype), str)
            good = good and (use.seed is None or is_integer(use.seed))
        if not good:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProgramError(
            f"kvjax: program, deserialize: want what a program says of its tables and {inputs} inputs, "
            f"got {head!r:.200}; export it again, as it is damaged or of a later kvjax"
        ) from error
    return uses, paths, frozen, places


def _some(items: Collection[str]) -> str:
    """At most five of them, in words."""
    return ", ".join(itertools.islice(items, 5)) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _type_of(x: Any) -> str:
    try:
        return type_text(jnp.result_type(x), np.shape(x))
    except (TypeError, ValueError):
        return type(x).__name__


def _fits(aval: Any, x: Any) -> bool:
    """Whether an array has the type of an input, as far as its own sizes say so: some may be any."""
    if not isinstance(x, (bool, int, float, complex)) and not hasattr(x, "dtype"):
        return False
    sizes = zip(aval.shape, np.shape(x), strict=False)
    return (
        len(aval.shape) == np.ndim(x)
        and str(jnp.result_type(x)) == str(aval.dtype)
        and all(size > 0 if not isinstance(want, int) else want == size for want, size in sizes)
    )


def export(
    fn: Callable[..., PyTree],
    *args: PyTree,
    shapes: Shapes = None,
    platforms: Sequence[str] = (HOST, DEVICE),
) -> Program:
    """Exports a function that reads tables, for processes that have the tables and not its code.

    Args:
      fn: function of `args`, traced by JAX, which only reads its tables. Tables are found among the arguments, for
        example in ``params``; if the function closes over one, it must be ``table.live()``. Other arrays that the
        function closes over become constants.
      *args: arrays, or ``jax.ShapeDtypeStruct``, in any trees.
      shapes: symbolic shapes of the arguments, as for ``jax.export.symbolic_args_specs``, so that one program takes
        batches of any size of at least 1: with ``(None, "b, ...")``, the first axis of each array of the second
        argument may be any b. An argument may have a tree of them, ``(None, {"keys": "b, ...", "x": "b, 3"})``. None
        for the shapes of `args`. Keys ``(b, n)`` are an array of words ``(b, n, 2)``, so
        their shape is "b, n, ...".
      platforms: the platforms on which the program can run.

    Returns:
      The program. ``program.serialize()`` returns bytes, `Program.deserialize` takes them.

    Raises:
      ValueError: the function writes to a table, or closes over a handle of one version, or a table has a mesh.
      ProgramError: a shape has not the axes of its array, or a platform cannot read tables. What else is wrong with a
        shape is JAX's ValueError.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np
      >>> table = kvjax.get_table("doc_exported", dim=2).upsert([1, 2], [[1.0, 2.0], [3.0, 4.0]])
      >>> params = {"table": table, "scale": np.float32(10)}
      >>> score = lambda params, keys: params["scale"] * jnp.sum(params["table"].lookup(keys), -1)
      >>> program = kvjax.export(score, params, kvjax.keys([1]), shapes=(None, "b, ..."))
      >>> program.tables
      {'doc_exported': TableUse(dim=2, dtype='float32', seed=None)}
      >>> program({"scale": np.float32(10)}, kvjax.keys([2, 1, 7])).tolist()
      [70.0, 30.0, 0.0]
      >>> table = table.upsert(1, [5.0, 5.0])
      >>> program({"scale": np.float32(1)}, kvjax.keys([1])).tolist()
      [10.0]
      >>> kvjax.drop_table("doc_exported")
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=is_table)
    leaves = [leaf.live() if is_table(leaf) else leaf for leaf in leaves]

    def flat(*arrays: Any) -> PyTree:
        rest = iter(arrays)
        return fn(*jax.tree.unflatten(tree, [leaf if is_table(leaf) else next(rest) for leaf in leaves]))

    given = dict(_arrays(args))
    per_array = _per_array(shapes, args)
    specs = jax.export.symbolic_args_specs(tuple(given.values()), per_array)
    for (path, array), spec, text in zip(given.items(), specs, per_array, strict=True):
        if np.ndim(array) != len(spec.shape):
            raise ProgramError(
                f"kvjax: export: want a shape of {np.ndim(array)} axes for {path!r}, got {text!r}; give 'b, ...' (of "
                "keys the last axis are their words)"
            )
    if not platforms:
        raise ProgramError(f"kvjax: export: want platforms= of {[HOST, DEVICE]}, got {platforms!r}; give one or both")
    jitted = jax.jit(flat)
    targets, uses = used_by(jax.make_jaxpr(jitted)(*specs).jaxpr)
    if lost := sorted(set(platforms) - {HOST, DEVICE}) if targets else ():
        raise ProgramError(
            f"kvjax: export: want platforms of {[HOST, DEVICE]}, where tables can be read, got {lost}; elsewhere "
            "kvjax.serving.FrozenTable.as_jax can"
        )
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]
    exported = jax.export.export(jitted, platforms=list(platforms), disabled_checks=allowed)(*specs)
    return Program(exported, uses, list(given), _frozen(args), _places(args))


def _per_array(shapes: Shapes, args: tuple[PyTree, ...]) -> tuple[str | None, ...]:
    """The spec of each array: one for an argument, or a part of it, holds for all arrays in that."""
    per_argument = [shapes] * len(args) if shapes is None or isinstance(shapes, str) else list(shapes)
    if len(per_argument) != len(args):
        raise ProgramError(
            f"kvjax: export: want shapes of {len(args)} arguments, got {len(per_argument)}; give None or "
            "'b, ...' for each"
        )
    found: list[str | None] = []

    def take(spec: Any, part: PyTree) -> None:
        if not (spec is None or isinstance(spec, str)):
            raise TypeError(spec)
        found.extend([spec] * len(_arrays((part,))))

    for i, (spec, arg) in enumerate(zip(per_argument, args, strict=True)):
        try:
            jax.tree.map(take, spec, arg, is_leaf=lambda x: x is None or isinstance(x, str))
        except (ValueError, TypeError, KeyError) as error:
            raise ProgramError(
                f"kvjax: export: want shapes of argument {i} as None, a text, or a tree of these that its tree begins "
                f"with, got {spec!r:.200}; give what fits it"
            ) from error
    return tuple(found)


def _frozen(args: tuple[PyTree, ...]) -> dict[str, str]:
    """What frozen tables among arguments are beside their arrays, by where they are."""
    return {path: leaf.said for path, leaf in _leaves(args, FrozenReadable)}


def _places(args: tuple[PyTree, ...]) -> dict[str, str]:
    """The names of tables among arguments, by where they are."""
    return {path: leaf.name for path, leaf in _leaves(args, Table)}


def _leaves(args: tuple[PyTree, ...], kind: type[Any]) -> list[tuple[str, Any]]:
    """The parts of arguments that are of a kind, by where they are."""
    found = jax.tree_util.tree_leaves_with_path(args, is_leaf=lambda x: isinstance(x, kind))
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found if isinstance(leaf, kind)
    ]


def _arrays(args: tuple[PyTree, ...]) -> list[tuple[str, Any]]:
    """The arrays among arguments, without tables, by where they are: in the words that do not tell a dict from a
    dataclass, so that what was restored will do."""
    found = jax.tree_util.tree_leaves_with_path(args, is_leaf=is_table)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found if not is_table(leaf)
    ]
