"""Table updates: what a write adds to the version of a handle, among the updates of `partition`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

from kvjax._keys.opaque import replaced, words_in

_NOTHING = np.zeros((1, 1), jax.dtypes.float0)


@jax.tree_util.register_pytree_node_class
class TableUpdate:
    """What a write adds to the version of a handle, in the place of the version: of the updates of `partition`.

    It can only be added. Whatever takes it for the update of an array beside its parameters, as weight decay does, gets
    JAX's error about trees that differ, and whatever computes with its leaves, as a scale, a clip or a test for NaN
    does, that about their dtypes: none is silently without effect on rows.

    Args:
      raised: ``()`` uint32, opaque.
      nothing: ``(1, 1)`` float0, which not even a comparison takes, and which is a matrix for what looks for those.
    """

    __slots__ = ("nothing", "raised")

    def __init__(self, raised: Any, nothing: Any = _NOTHING) -> None:
        self.raised = raised
        self.nothing = nothing

    def __radd__(self, version: Any) -> Any:
        return replaced(words_in(version) + words_in(self.raised))

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.raised, self.nothing), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> Self:
        return cls(*children)

    def __repr__(self) -> str:
        return f"TableUpdate({self.raised})"
