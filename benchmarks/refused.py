"""What `partition(..., on_refused="keep")` costs where nothing is refused: time of a step, and memory of its program.

    python benchmarks/refused.py [--dense 2000000] [--keys 4096] [--steps 200]

Steps of the two programs in turns, with donated parameters and states.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax

DENSE = {
    "sgd": lambda: optax.sgd(1e-3),
    "adam": lambda: optax.adam(1e-3),
    "clip, adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def program(name: str, on_refused: str, size: int, keys: kvjax.Keys, slope: jax.Array) -> list:
    """The compiled step, and parameters and state to begin with."""
    tx = kvjax.optax.partition(dense=DENSE[name](), tables=optax.adam(1e-3), on_refused=on_refused)
    params = {"w": jnp.ones(size), "t": kvjax.get_table(f"{name}, {on_refused}", dim=16)}
    state = tx.init(params)

    def step(params, state, keys, slope):
        def loss(params):
            return jnp.sum(params["t"].lookup(keys)) + jnp.sum(params["w"] * slope)

        value, grads = kvjax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, keys, slope).compile()
    return [compiled, params, state]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", type=int, default=2_000_000, help="dense parameters")
    parser.add_argument("--keys", type=int, default=4096, help="keys a step")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    batches = [kvjax.keys(rng.integers(0, 100_000, args.keys)) for _ in range(10)]
    slope = jnp.asarray(rng.normal(size=args.dense), jnp.float32)
    for name in DENSE:
        runs = {on: program(name, on, args.dense, batches[0], slope) for on in ("error", "keep")}
        cpu: dict[str, list[float]] = {on: [] for on in runs}
        for i in range(args.steps):
            for on, run in runs.items():
                start = time.process_time()
                run[1], run[2], value = run[0](run[1], run[2], batches[i % 10], slope)
                jax.block_until_ready((run[1], run[2], value))
                cpu[on].append(time.process_time() - start)
        for on, run in runs.items():
            temporary = run[0].memory_analysis().temp_size_in_bytes / 2**20
            touched = run[0].cost_analysis()["bytes accessed"] / 2**20
            ms = 1e3 * np.median(cpu[on][10:])
            print(f"{name:12} {on:6} {ms:6.2f} ms of CPU, {temporary:6.2f} MiB of scratch, {touched:7.1f} MiB accessed")


if __name__ == "__main__":
    main()
