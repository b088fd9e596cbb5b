"""Meta: what kvjax.json says of a table, as it is written, and as it is read: each field is checked first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._spec.options import ENTRIES, ROUNDINGS, Request, saved_as
from kvjax._values.arguments import integer_in, is_integer, is_name, is_real
from kvjax._values.distributions import DISTRIBUTIONS
from kvjax._values.dtypes import ROW_DTYPES, is_number
from kvjax._values.key_width import KEY_DTYPES
from kvjax._values.slot_layout import parse_type, type_text
from kvjax._values.snapshot import ADMISSION_COLUMNS
from kvjax.checkpoint._disk.format import FORMAT, PACKED, REMOVED, UNLISTED, Damaged, shards_of
from kvjax.checkpoint._disk.rules import NeedsFunctionError, dump, load, load_initializer
from kvjax.ffi import host
from kvjax.initializers import Pool, resolve

FIELDS = saved_as("fields")
RULES = saved_as("rules")
EQUAL_FIELDS = ("dim", "dtype", "key_dtype", "seed", "initializer")  # the key's type, or -1 would become 2**64 - 1
"""In which a table is as what is restored into it, and a delta as what it builds on."""

_MOST_ROWS = 2**48
_MOST_SHARDS = 2**20


def made_with(dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a table was made with, as far as it is saved, by the names of arguments: the same in all its processes."""
    return {"dim": dim} | {option: dump(options[option]) for option in (*FIELDS, *RULES)}


def described(name: str, dim: int, options: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What kvjax.json says of a table.

    Args:
      name: of the table.
      dim: of it.
      options: what it has as each option that is saved.
      shards: of each on disk "rows", "last_step", "slots" and "extras".
    """
    meta: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "dim": dim,
        **{option: dump(options[option]) for option in FIELDS},
        "options": {option: dump(options[option]) for option in RULES},
        "num_buckets": host.NUM_BUCKETS,
        "num_shards": len(shards),
        "rows": sum(shard["rows"] for shard in shards),
        "last_step": max(shard["last_step"] for shard in shards),
        "slots": next((shard["slots"] for shard in shards if shard["slots"]), []),
    }
    if len(shards) == 1:
        return meta | {"extras": shards[0]["extras"]}
    return meta | {"shards": [{key: shard[key] for key in ("rows", "extras")} for shard in shards]}


def check_meta(meta: Any, formats: Sequence[str], name: str) -> dict[str, Any]:
    """What kvjax.json says, if it can be a table's; what an earlier kvjax did not write is as it was then.

    Args:
      meta: the JSON.
      formats: of which it must be one.
      name: of the table.

    Raises:
      Damaged: it cannot, or has a field that this kvjax does not know.
    """
    if not isinstance(meta, dict) or meta.get("format") not in formats:
        got = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise Damaged(f"want kvjax.json of format {formats[0]!r}, got {got!r:.100}")
    if meta["format"] == UNLISTED:
        meta = _AT_FIRST | meta
    missing = sorted(_FIELDS.keys() - meta.keys() - _LATER)
    if missing or meta.keys() - _FIELDS.keys():
        got = ", ".join([f"no {field!r}" for field in missing] + [repr(f) for f in meta.keys() - _FIELDS.keys()])
        raise Damaged(f"want kvjax.json with the fields of a table, got {got:.200}")
    for field, value in meta.items():
        _check(_FIELDS[field](value), field, value)
    _check(meta["name"] == name, "name", meta["name"], f"{name!r}")
    _check_initializer(meta)
    _check_shards(meta)
    return meta | {"options": _options(meta)}


def _check(ok: bool, field: str, got: Any, want: str = "one that a table can have") -> None:
    if not ok:
        raise Damaged(f"want {field} in kvjax.json as {want}, got {got!r:.100}")


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def _are_slots(x: Any) -> bool:
    """Names and types, as [["mu", "float32[4]"], ...]."""
    if not isinstance(x, list) or not all(isinstance(s, list) and len(s) == 2 and all(map(is_name, s)) for s in x):
        return False
    return len({slot for slot, _ in x}) == len(x) and all(_is_slot_type(text) for _, text in x)


def _is_slot_type(text: str) -> bool:
    try:
        dtype, shape = parse_type(text)
    except ValueError:
        return False
    number = is_number(dtype) or dtype == np.bool_
    return number and all(n >= 0 for n in shape) and text == type_text(dtype, shape)


def _are_extras(x: Any) -> bool:
    """Dtype and shape of each, as {"pinned": ["bool", [9]], ...}."""
    known = {"pinned": "bool", REMOVED: "int64"} | ADMISSION_COLUMNS
    return isinstance(x, dict) and all(
        isinstance(kind, list) and len(kind) == 2 and kind[0] == known.get(name) and _is_length(kind[1])
        for name, kind in x.items()
    )


def _is_length(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 1 and integer_in(0, _MOST_ROWS)(shape[0])


def _is_delta(x: Any) -> bool:
    """The digest of the checkpoint that it builds on, as {"since": "0123456789abcdef", "counts_of_all": false}."""
    ok = isinstance(x, dict) and x.keys() == {"since", "counts_of_all"} and _is_bool(x["counts_of_all"])
    return ok and isinstance(x["since"], str) and re.fullmatch("[0-9a-f]{16}", x["since"]) is not None


def _are_shards(x: Any) -> bool:
    return isinstance(x, list) and all(
        isinstance(s, dict) and s.keys() == {"rows", "extras"} and integer_in(0, _MOST_ROWS)(s["rows"])
        and _are_extras(s["extras"])
        for s in x
    )  # fmt: skip


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "format": lambda x: x in (FORMAT, PACKED, UNLISTED),
    "name": is_name,
    "dim": integer_in(1, host.MAX_DIM),
    "dtype": lambda x: x in ROW_DTYPES,
    "key_dtype": lambda x: x in KEY_DTYPES,
    "initializer": lambda x: isinstance(x, dict),
    "seed": integer_in(0, 2**64 - 1),
    "trainable": _is_bool,
    "rounding": lambda x: x in ROUNDINGS,
    "options": lambda x: isinstance(x, dict) and x.keys() <= set(RULES),
    "num_buckets": lambda x: is_integer(x) and x == host.NUM_BUCKETS,
    "num_shards": integer_in(1, _MOST_SHARDS),
    "rows": integer_in(0, _MOST_ROWS),
    "last_step": integer_in(0, 2**63 - 1),
    "slots": _are_slots,
    "extras": _are_extras,
    "shards": _are_shards,
    "partitioner": is_name,
    "delta": _is_delta,
}
_LATER = {"extras", "shards", "partitioner", "delta"}
"""Fields that not all tables have."""
_AT_FIRST: dict[str, Any] = {"rounding": ENTRIES["rounding"].default, "options": {}}
"""Fields that the first kvjax did not write."""


def _check_initializer(meta: dict[str, Any]) -> None:
    saved: dict[str, Any] = meta["initializer"]
    fields = {"pool": {"kind", "shape"}, "generated": {"kind", "probes"}, "segments": {"kind", "ends", "parts"}}
    ok = saved.keys() == fields.get(str(saved.get("kind")), {"kind", "a", "b"})
    if ok and saved["kind"] == "pool":
        shape = saved["shape"]
        ok = isinstance(shape, list) and len(shape) == 2 and integer_in(1, _MOST_ROWS)(shape[0])
        ok = ok and is_integer(shape[1]) and shape[1] == meta["dim"]
    elif ok and saved["kind"] == "generated":
        ok = isinstance(saved["probes"], list) and all(map(is_real, saved["probes"]))
    elif ok:
        ends, parts = saved.get("ends", [meta["dim"]]), saved.get("parts", [saved])
        ok = isinstance(ends, list) and all(map(is_integer, ends)) and ends[-1:] == [meta["dim"]]
        ok = ok and isinstance(parts, list) and all(map(_is_part, parts)) and _resolves(saved, meta["dim"])
    _check(ok, "initializer", saved)


def _is_part(x: Any) -> bool:
    return (
        isinstance(x, dict) and x.keys() == {"kind", "a", "b"} and x["kind"] in DISTRIBUTIONS and is_real(x["a"])
        and is_real(x["b"])
    )  # fmt: skip


def _resolves(saved: dict[str, Any], dim: int) -> bool:
    try:
        made = load_initializer(saved)
        return not isinstance(made, Pool) and resolve(made, dim) == made
    except (TypeError, ValueError):
        return False


def _check_shards(meta: dict[str, Any]) -> None:
    shards = shards_of(meta)
    rows = [shard["rows"] for shard in shards]
    _check(len(rows) == meta["num_shards"], "num_shards", meta["num_shards"], f"{len(rows)}")
    _check(sum(rows) == meta["rows"], "rows", meta["rows"], f"{sum(rows)}")
    _check("shards" not in meta or "extras" not in meta, "shards", rows)
    for shard in shards:
        extras = {name: shape[0] for name, (_, shape) in shard["extras"].items()}
        _check("delta" in meta or REMOVED not in extras, "extras", extras)
        _check(extras.get("pinned", shard["rows"]) == shard["rows"], "extras", extras)
        _check(extras.get("pending_keys") == extras.get("pending_counts"), "extras", extras)
        _check(extras.get("sketch", 0) % host.NUM_BUCKETS == 0, "extras", extras)
    sketches = {shard["extras"]["sketch"][1][0] for shard in shards if "sketch" in shard["extras"]}
    _check(len(sketches) <= 1, "extras", sketches)


def _options(meta: dict[str, Any]) -> dict[str, Any]:
    """The rules of a table, each checked and with all of its fields; defaults of those that its kvjax did not know."""
    found: dict[str, Any] = {}
    request = Request(meta["name"], "restore", meta["dim"])
    request.options["dtype"] = meta["dtype"]
    for rule in RULES:
        default = ENTRIES[rule].default
        try:
            try:
                value = load(meta["options"][rule]) if rule in meta["options"] else default
                found[rule] = dump(value)
            except NeedsFunctionError:  # which a table that is there may have
                value, found[rule] = default, meta["options"][rule]
            request.resolve(rule, value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Damaged(f"want {rule} in kvjax.json as one that a table can have, got {error}") from error
    return {rule: found[rule] if rule in meta["options"] else dump(request[rule]) for rule in RULES}
