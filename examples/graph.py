"""Link prediction on a growing graph: node embeddings that are trained on edges as they come, in one pass.

    python examples/graph.py                      # a synthetic graph with planted communities
    python examples/graph.py --data edges.npz     # "source" and "target" (n,) of any 64-bit ids, in the order of time
    python examples/graph.py --max-capacity 0     # a row for every node there ever was

Nodes come and go: a node has edges for a while, and then no more. So the tables have a limit, and the nodes that were
seen longest ago lose their rows. `kvjax.simulate` says beforehand what share of node ids each limit finds. Every
edge is judged before it is trained on: its target is ranked among those of other edges of its batch, which gives an
area under the curve (AUC). The exit code is 0 if the tables with the limit are as good as those with a row for
every node, to a hundredth, and those reach 0.85, which the communities allow; else 1.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arguments import arrays_of, natural, parsed, positive, writable
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax

DIM = 32
NEGATIVES = 64  # other targets of the batch that each edge is held against
GOAL = 0.85  # AUC
COST = 0.01  # of the limit, at the most


class Edges(NamedTuple):
    source: np.ndarray  # (n,) 64-bit ids
    target: np.ndarray  # (n,)


def planted(edges: int, seed: int) -> Edges:
    """A graph whose nodes have edges within their community, and come and go: each has its time."""
    rng = np.random.default_rng(seed)
    nodes, alive, communities = max(edges // 40, 1), max(edges // 400, 1), 64
    ids = rng.integers(-(2**63), 2**63 - 1, nodes)  # of no order, as hashes of names are
    community = rng.integers(0, communities, nodes)
    first = np.arange(edges) * (nodes - alive) // edges  # of the nodes that are there at the time of an edge
    source = first + rng.integers(0, alive, edges)
    # The members of each community in the order of their time, and among them those who are there.
    members = np.argsort(community, kind="stable")
    place = community[members] * nodes + members
    begin = np.searchsorted(place, community[source] * nodes + first)
    end = np.searchsorted(place, community[source] * nodes + first + alive)
    target = members[begin + rng.integers(0, 2**31, edges) % (end - begin)]  # the source is one of them
    anyone = rng.random(edges) < 0.1
    target[anyone] = (first + rng.integers(0, alive, edges))[anyone]
    return Edges(ids[source], ids[target])


class Model(nnx.Module):
    """The affinity of two nodes: the dot product of what the one is as a source and the other as a target."""

    def __init__(self, name: str, options: dict[str, Any], rngs: nnx.Rngs) -> None:
        small = kvjax.initializers.normal(0.1)
        self.source = kvjax.flax.nnx.Embed(f"{name}_source", DIM, initializer=small, rngs=rngs, **options)
        self.target = kvjax.flax.nnx.Embed(f"{name}_target", DIM, initializer=small, rngs=rngs, **options)

    def __call__(self, source: kvjax.Keys, target: kvjax.Keys) -> jax.Array:
        """Affinities ``(n, 1 + NEGATIVES)`` of each source to its own target and to those of other edges."""
        n = source.shape[0]
        others = (jnp.arange(n)[:, None] + jnp.arange(1 + NEGATIVES) * (n // (1 + NEGATIVES))) % n
        return jnp.einsum("nd,nkd->nk", self.source(source), self.target(target)[others])


def loss_of(model: Model, source: kvjax.Keys, target: kvjax.Keys) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of each edge's own target, and how many of the others have less affinity.

    The sum over the batch: the gradients of a mean would be so small that Adagrad, whose sums start at 0.1, would not
    adapt to them.
    """
    affinity = model(source, target)
    own, others = affinity[:, :1], affinity[:, 1:]
    below = jnp.mean((others < own) + 0.5 * (others == own), axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(affinity, jnp.zeros(len(affinity), int)).sum(), below


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer[Model], source: kvjax.Keys, target: kvjax.Keys) -> jax.Array:
    (_, below), grads = kvjax.flax.nnx.value_and_grad(loss_of, has_aux=True)(model, source, target)
    optimizer.update(model, grads)
    return below


def train(edges: Edges, name: str, limit: int, args: argparse.Namespace) -> dict[str, Any]:
    """One pass over all full batches; the AUC is that of the second half of the edges, judged before training."""
    options = {"max_capacity": limit, "on_full": "evict"} if limit else {}
    model = Model(name, options, nnx.Rngs(args.seed))
    tx = kvjax.optax.partition(dense=optax.set_to_zero(), tables=optax.adagrad(args.lr))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    steps, below, begun = len(edges.source) // args.batch, [], time.perf_counter()
    for i in track(range(steps), f"training, {name.replace('_', ' ')}"):
        some = slice(i * args.batch, (i + 1) * args.batch)
        found = step(model, optimizer, kvjax.keys(edges.source[some]), kvjax.keys(edges.target[some]))
        if i == 0:
            begun = time.perf_counter()  # it has compiled
        if i >= steps // 2:
            below.append(found)
    auc = float(np.mean(np.concatenate(below)))
    stats = [kvjax.stats()[f"{name}_{end}"] for end in ("source", "target")]
    return {
        "auc": auc, "rows": sum(s.size for s in stats), "evicted": sum(sum(s.evicted.values()) for s in stats),
        "edges_per_s": (steps - 1) * args.batch / (time.perf_counter() - begun),
    }  # fmt: skip


def report(found: dict[str, Any], console: Console) -> None:
    table = Table(title="Link prediction")
    for column in ("", "AUC", "rows", "evicted", "edges/s"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, row in found.items():
        if isinstance(row, dict) and "auc" in row:
            cells = f"{row['auc']:.4f}", f"{row['rows']:,}", f"{row['evicted']:,}", f"{row['edges_per_s']:,.0f}"
            table.add_row(name.replace("_", " "), *cells)
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="NPZ", help='arrays "source" and "target" (n,) of ids, in the order of time')
    add("--edges", type=positive, default=1_000_000, help="of the synthetic graph")
    add(
        "--max-capacity",
        type=natural,
        metavar="N",
        help="rows of each table, 0 for no limit (default: what finds 95 %% of all that can be)",
    )
    add("--batch", type=positive, default=1024, help="edges a step")
    add("--lr", type=float, default=0.2, help="Adagrad's")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a short run, to see that it works; no goal to reach")
    add("--json", type=writable, metavar="PATH", help="write the summary")
    return parsed(parser, edges=30_000, batch=256)


def limit_of(edges: Edges, args: argparse.Namespace, console: Console) -> tuple[int, dict[str, float]]:
    """The least of some limits that finds nearly all ids that a table without one finds, and what each finds."""
    starts = range(0, len(edges.source) - args.batch + 1, args.batch)
    nodes = len(np.unique(edges.source))
    limits = [max(nodes >> shift, 2 * args.batch) for shift in range(6, 0, -1)]
    found = kvjax.simulate((edges.source[i : i + args.batch] for i in starts), [*limits, None])
    rates = {str(one.max_capacity or nodes): one.hit_rate for one in found}
    console.print("share of ids with a row, by limit: " + ", ".join(f"{n} {rate:.1%}" for n, rate in rates.items()))
    enough = next((one for one in found[:-1] if one.hit_rate >= 0.95 * found[-1].hit_rate), found[-1])
    return (args.max_capacity if args.max_capacity is not None else enough.max_capacity or 0), rates


def main() -> int:
    args, console = parse_arguments(), Console()
    if args.data:
        found = arrays_of(args.data, "source", "target")
        edges = Edges(found["source"], found["target"])
        shapes = [ids.shape for ids in edges]
        if len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            sys.exit(f"{args.data}: want a source and a target for each edge (n,), got shapes {shapes}")
    else:
        edges = planted(args.edges, args.seed)
    if len(edges.source) < 2 * args.batch:
        sys.exit(f"want {2 * args.batch} edges or more, got {len(edges.source)}; give --batch")
    limit, rates = limit_of(edges, args, console)
    found: dict[str, Any] = {"limit": limit, "hit_rates": rates, "all_nodes": train(edges, "all_nodes", 0, args)}
    if limit:
        found["with_limit"] = train(edges, "with_limit", limit, args)
    report(found, console)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.smoke or not limit:
        return 0
    lost = found["all_nodes"]["auc"] - found["with_limit"]["auc"]
    reached = lost <= COST and (args.data is not None or found["all_nodes"]["auc"] >= GOAL)
    console.print(f"{'Reached' if reached else 'MISSED'} the goal: the limit costs {lost:z.4f} of the AUC.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
