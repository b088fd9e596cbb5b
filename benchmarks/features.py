"""Features of one table looked up together and one by one, in whole training steps.

    python benchmarks/features.py [--devices 4] [--json FILE]      # one to three minutes
    python benchmarks/features.py --smoke                          # tiny sizes, to see that it runs

26 features with a salt each share a table of dim 16: `kvjax.lookup_many` of all of them, and of one at a time. Both
steps take turns; medians of wall-clock time. With `--devices` the table is over that many devices of the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import in_turns

FEATURES, DIM = 26, 16


def step_of(together: bool) -> Callable[..., Any]:
    """A step of keys ``(batch, FEATURES, length)``: rows where the length is 1, else bags."""
    import jax
    import jax.numpy as jnp
    import optax

    import kvjax

    tx = optax.adagrad(0.1)

    def loss(table: Any, keys: Any) -> Any:
        bags = keys.shape[2] > 1
        features = {
            str(f): kvjax.Feature(
                table, keys[:, f] if bags else keys[:, f, 0], salt=f, combiner="mean" if bags else None
            )
            for f in range(FEATURES)
        }
        parts = [features] if together else [{name: feature} for name, feature in features.items()]
        rows = [row for part in parts for row in kvjax.lookup_many(part).values()]
        return sum((jnp.sum(jnp.tanh(row)) for row in rows), jnp.float32(0))

    @jax.jit
    def step(table: Any, keys: Any) -> Any:
        value, grads = kvjax.value_and_grad(loss)(table, keys)
        return table.apply(tx, grads)[0], value

    return step


def measured(batch: int, length: int, devices: int, turns: int) -> dict[str, Any]:
    """Milliseconds a step, together and one by one."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import kvjax

    rng, mesh = np.random.default_rng(0), jax.make_mesh((devices,), ("x",)) if devices > 1 else None
    ids = [kvjax.keys(kvjax.hash_keys(rng.integers(0, 100_000, (batch, FEATURES, length)))) for _ in range(4)]
    spread = jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec("x"))
    keys = [jax.device_put(each, spread) for each in ids]
    ways = {"together": True, "one by one": False}
    steps = {way: step_of(together) for way, together in ways.items()}
    tables = {way: kvjax.get_table(f"features {way}", dim=DIM, mesh=mesh) for way in ways}

    def step(way: str, turn: int) -> Any:
        tables[way], value = steps[way](tables[way], keys[turn % 4])
        return tables[way].version, value

    seconds = in_turns({way: functools.partial(step, way) for way in ways}, turns, first=4)  # which make the rows
    for way in ways:
        kvjax.drop_table(f"features {way}")
    return {"batch": batch, "length": length} | {way: 1e3 * each for way, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.devices > 1:  # before JAX asks
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    from rich.console import Console
    from rich.table import Table

    sizes = [(8, 1), (8, 2)] if args.smoke else [(64, 1), (64, 8), (4096, 1), (4096, 8)]
    found = [measured(batch, length, args.devices, 3 if args.smoke else 15) for batch, length in sizes]
    grid = Table("batch", "keys a feature", "together", "one by one", title=f"ms a step, {args.devices} devices")
    for each in found:
        times = (f"{each[way]:.2f}" for way in ("together", "one by one"))
        grid.add_row(str(each["batch"]), str(each["length"]), *times)
    Console(width=100).print(grid)
    if args.json:
        args.json.write_text(json.dumps({"devices": args.devices, "steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
