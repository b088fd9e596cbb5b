"""Which versions of JAX cannot run what, and why: the one place that knows."""

from __future__ import annotations

import re

import jax

from kvjax._spec import fail

# Seen with 0.11.2, on CPU and GPU, at the first lookup; 0.11.0 and 0.11.1 passed what was tried, and are not tested.
CRASHES_WITH_MESH = {
    (
        0,
        11,
    ): "XLA's compiler may end the process on programs over a mesh (a segmentation fault in Shardy, seen in 0.11.2)",
}
"""Why tables over a mesh are refused, by the first two numbers of jax's version. Tables in one place work there."""


def mesh_trouble(version: str) -> str | None:
    """Why tables over a mesh are refused on a version of JAX, or None.

    Example:
      >>> mesh_trouble("0.10.2"), mesh_trouble("0.12.0.1")
      (None, None)
      >>> "segmentation fault" in mesh_trouble("0.11.2")
      True
    """
    first_two = re.match(r"(\d+)\.(\d+)", version)
    return first_two and CRASHES_WITH_MESH.get((int(first_two[1]), int(first_two[2])))


def check_mesh(name: str, op: str) -> None:
    """Whether this process's JAX can run programs on a table over a mesh; asked before there is one.

    Args:
      name: the table's.
      op: what was asked to put it there.

    Raises:
      RuntimeError: it cannot.
    """
    if trouble := mesh_trouble(jax.__version__):
        raise fail(
            RuntimeError, name, op, "a jax that runs tables with mesh=", f"jax {jax.__version__}, where {trouble}",
            "install jax 0.10 (Python 3.11 and newer) or 0.12 (3.12 and newer), or leave mesh= out",
        )  # fmt: skip
