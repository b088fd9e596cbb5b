"""`kvjax.commit`: asks whether steps have been refused whose errors `kvjax.optax.partition` has kept back."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
from jax.core import Tracer
from jax.tree_util import keystr

from kvjax import ffi
from kvjax._process import PROCESS
from kvjax._table.at_exit import wait_for_programs
from kvjax._table.handle import Handle
from kvjax._values.arrays import PyTree

T = TypeVar("T")


class CommitState(NamedTuple):
    """State of ``partition(..., on_refused="keep")``, for `kvjax.commit`.

    Attributes:
      refused: ``()`` uint32, 0, or a number by which this process finds the failure of the refused step.
      inner_state: a `kvjax.optax.PartitionState`.
    """

    refused: jax.Array
    inner_state: PyTree


def commit(state: T = None) -> T:
    """Waits for the steps that lead to a state, and raises the error of the first step that a table refused.

    A step of ``kvjax.optax.partition(..., on_refused="keep")`` that a table refuses (it is full, a sink fails, there is
    no memory) changes nothing: tables, dense parameters and optimizer states come out of the program as they went in,
    even if they were donated. The steps after it change nothing either, until this function raises the error, once. The
    state that you gave it is then the one from before the refused step, and training can go on with it, for example
    once there is space. Batches after a refused step are lost until you call this, but each call waits for the device:
    choose how often to call it. Counters outside `partition` have counted these steps: ``TrainState.step``, and
    transforms and wrappers around `partition` (`kvjax.optax.accumulate` has dropped the gradients of its refused
    updates).

    Not inside ``jit``. Until it is called, host calls on the whole table whose step was refused (`Table.export`, a
    save) raise, and at the end of the process a message says what was refused. A failure that is recorded in a restored
    state, from another process, is ignored.

    Args:
      state: any pytree with the state of such an optimizer in it, for instance a ``TrainState``, an ``nnx.Optimizer``
        or its ``nnx.state``. Without a state, it checks all steps of the process, for cases where the refused state is
        lost.

    Returns:
      The same state.

    Raises:
      MemoryError: there is no space for a step, in the process or in a table.
      ValueError, RuntimeError: a step was refused for another reason.
      TypeError: `state` does not contain such a state, or it is traced.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> params = kvjax.get_table("doc_commit", dim=1, max_capacity=1, on_full="error")
      >>> tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0), on_refused="keep")
      >>> state = tx.init(params)
      >>> for ids in ([7], [7, 8], [7]):
      ...     updates, state = tx.update(kvjax.SparseRows(np.array(ids), jnp.ones((len(ids), 1))), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     try:
      ...         state = kvjax.commit(state)
      ...     except MemoryError as error:
      ...         print(str(error)[:61])
      kvjax: table 'doc_commit', apply: want at most max_capacity=1
      >>> params.lookup(7).tolist(), params.frequency(7).tolist()
      ([-2.0], 2)
      >>> kvjax.drop_table("doc_commit")
    """
    if state is None:
        wait_for_programs()
        numbers = [number for number, *_ in ffi.left_failures()]
    else:
        numbers = _numbers(state)
        if not numbers or any(isinstance(number, Tracer) for number in numbers):
            raise TypeError(
                "kvjax: commit: want, outside jit, a state of kvjax.optax.partition(..., on_refused='keep'), got "
                + ("a traced one; call it between steps" if numbers else "none in this tree; make the optimizer with "
                   "that, as without it a step that is refused raises by itself")
            )  # fmt: skip
    with PROCESS.blaming():
        for number in numbers:
            ffi.ask_failure(int(number))
    return state


def _numbers(state: Any) -> list[Any]:
    """The leaves ``refused`` beside an ``inner_state``: Flax makes dictionaries of named tuples."""
    with_paths = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, Handle))  # which would warn of these
    leaves = [([keystr((key,), simple=True) for key in path], x) for path, x in with_paths]
    inner = {tuple(path[:i]) for path, _ in leaves for i, key in enumerate(path) if key == "inner_state"}
    return [x for path, x in leaves if any(key == "refused" and tuple(path[:i]) in inner for i, key in enumerate(path))]
