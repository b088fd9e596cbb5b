"""Like: what Orbax restored without a template, in the structure of another state, or of one that has changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from kvjax._values.errors import fail, warn

_Path = tuple[str, ...]


def in_the_form_of(like: Any, restored: Any) -> Any:
    """The leaves of `restored` in the structure that was saved.

    Raises:
      ValueError: `like` has another.
    """
    wanted, found = _leaves(like), dict(_leaves(restored))
    missing = [path for path, _ in wanted if path not in found]
    if missing or len(found) > len(wanted):
        lost = missing or sorted(found.keys() - dict(wanted).keys())
        raise fail(
            ValueError, None, "combine", "a restored state like the other",
            f"one {'without' if missing else 'with'} {'/'.join(lost[0])}",
            "give as like= a state of the structure that was saved; partial=True if the model has changed",
        )  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(like), [found[path] for path, _ in wanted])


def fitted(like: Any, restored: Any, new: Collection[str], gone: Collection[str]) -> Any:
    """The leaves of `restored` whose paths and shapes `like` has, and the others of `like`; a warning lists those.

    Args:
      like: a state of the model as it is now.
      restored: what was saved of it.
      new: tables that were not restored, which the warning names, too.
      gone: tables that were restored and have no place.

    Raises:
      ValueError: `like` has no value for a leaf that is taken from it.
    """
    wanted, found = _leaves(like), dict(_leaves(restored))
    own = {path: leaf for path, leaf in wanted if path not in found or np.shape(found[path]) != np.shape(leaf)}
    for path, leaf in own.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise fail(
                ValueError, None, "combine", f"a like= with a value for {'/'.join(path)}, which was not saved so",
                "a shape alone", "give a state that init has made",
            )  # fmt: skip
    lost = found.keys() - dict(wanted).keys()
    if own or lost or new or gone:
        warn(
            "kvjax: combine: the restored state is not that of the model as it is now. From like= come "
            f"{_listed(own, new)}; not used of what was restored: {_listed(lost, gone)}"
        )
    return jax.tree.unflatten(jax.tree.structure(like), [own.get(path, found.get(path)) for path, _ in wanted])


def _listed(paths: Collection[_Path], tables: Collection[str]) -> str:
    return ", ".join([*map("/".join, sorted(paths)), *(f"table {name!r}" for name in sorted(tables))]) or "nothing"


def _leaves(tree: Any) -> list[tuple[_Path, Any]]:
    """With their paths, in the words in which Orbax saves those: attributes, numbers and keys alike."""
    return [
        (tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
