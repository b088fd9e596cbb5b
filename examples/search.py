"""Search: titles are found by queries that spell words wrong, or use others of the same meaning.

    python examples/search.py                     # made-up titles, and queries for them
    python examples/search.py --data clicks.tsv   # lines of a query, a tab and the title that was chosen

A text is a bag of its words and of the three-letter parts of these, hashed to 64 bits. So there is no vocabulary, and
one table serves queries and titles. Many parts of misspelt words are never seen again, and get no row. There is no Flax
here, for the table is the whole model. It ends as a frozen table, without the rows of rare parts and in 8 bits, and
with that alone NumPy answers the test's queries. The share of these whose title is among the first ten is held against
that of the same parts weighed by tf-idf. The exit code is 0 if the table finds at least half of the made-up titles that
tf-idf misses, and the frozen one as many to a hundredth, else 1.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arguments import natural, parsed, positive, writable
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import sparse

import kvjax

DIM = 64
TEMPERATURE = 0.07
GOAL = 0.5  # of what tf-idf misses
TX = optax.adagrad(0.1)


class Clicks(NamedTuple):
    queries: list[str]
    titles: list[str]  # of the same length: what was chosen for each query


def planted(titles: int, seed: int) -> Clicks:
    """Titles of made-up words. Queries have some of the words, a third of them as a synonym and a third misspelt."""
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = np.unique(["".join(rng.choice(syllables, 3)) for _ in range(6000)])
    synonym = dict(zip(words, rng.permutation(words), strict=True))
    common = 1 / (10 + np.arange(len(words)))  # some words are in many titles
    texts = [rng.choice(words, rng.integers(4, 8), replace=False, p=common / common.sum()) for _ in range(titles)]

    def said(word: str) -> str:
        chance = rng.random()
        if chance < 1 / 3:
            return synonym[word]
        at = rng.integers(0, len(word) - 1)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :] if chance < 2 / 3 else word

    clicks = [texts[i] for i in rng.integers(0, titles, 12 * titles)]
    queries = [" ".join(said(word) for word in rng.permutation(text)[:3]) for text in clicks]
    return Clicks(queries, [" ".join(text) for text in clicks])


def read(path: Path) -> Clicks:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"want lines of a query, a tab and a title, got: {error}")
    lines = [line.split("\t") for line in text.splitlines() if line.strip()]
    if wrong := [i for i, line in enumerate(lines) if len(line) != 2]:
        sys.exit(f"want lines of a query, a tab and a title; line {wrong[0] + 1} of {path} is something else")
    return Clicks([query for query, _ in lines], [title for _, title in lines])


class Texts:
    """Texts as bags of keys: of words, and of their parts of three letters."""

    def __init__(self, texts: list[str]) -> None:
        bags = [[part for word in text.lower().split() for part in self._parts(word)] for text in texts]
        self.lengths = np.array([len(bag) for bag in bags])
        width = max(int(self.lengths.max(initial=1)), 1)
        self.mask = np.arange(width) < self.lengths[:, None]
        self.keys = np.zeros(self.mask.shape, np.int64)
        self.keys[self.mask] = kvjax.hash_keys([part for bag in bags for part in bag])

    @staticmethod
    def _parts(word: str) -> list[str]:
        marked = f"<{word}>"
        return [marked, *(marked[i : i + 3] for i in range(len(marked) - 2))]

    def some(self, at: Any) -> tuple[kvjax.Keys, np.ndarray]:
        return kvjax.keys(self.keys[at]), self.mask[at]


def unit(bags: Any, xp: Any = jnp) -> Any:
    return bags / xp.maximum(xp.linalg.norm(bags, axis=-1, keepdims=True), 1e-6)


@jax.jit
def encode(table: kvjax.Table, keys: kvjax.Keys, mask: jax.Array) -> jax.Array:
    return unit(kvjax.lookup_bag(table, keys, mask=mask, combiner="sum"))


@jax.jit
def step(table: kvjax.Table, queries: Any, titles: Any, which: jax.Array) -> tuple[kvjax.Table, jax.Array]:
    """One step towards each query's own title, away from the others of the batch. `which` numbers the titles."""

    def loss_of(table: kvjax.Table) -> jax.Array:
        scores = encode(table, *queries) @ encode(table, *titles).T / TEMPERATURE
        again = (which[:, None] == which) & ~jnp.eye(len(which), dtype=bool)  # the same title is no other
        own = jnp.arange(len(which))
        # Not the mean, whose gradients are so small that Adagrad, whose sums start at 0.1, would not adapt to them.
        return optax.softmax_cross_entropy_with_integer_labels(jnp.where(again, -1e9, scores), own).sum()

    loss, grads = kvjax.value_and_grad(loss_of)(table)
    return table.apply(TX, grads)[0], loss


def train(clicks: Clicks, args: argparse.Namespace) -> tuple[kvjax.Table, float]:
    names, which = np.unique(clicks.titles, return_inverse=True)
    queries, titles = Texts(clicks.queries), Texts(names.tolist())
    initial = kvjax.initializers.normal(0.1)
    often = kvjax.admit.MinCount(args.epochs + 1)  # so what one click alone has gets no row
    table = kvjax.get_table("part", dim=DIM, initializer=initial, admit=often, seed=args.seed)
    batch = min(args.batch, len(which))
    rng, steps, begun = np.random.default_rng(args.seed), len(which) // batch, 0.0
    for epoch in range(args.epochs):
        order = rng.permutation(len(which))[: steps * batch].reshape(steps, batch)
        for some in track(order, f"epoch {epoch + 1} of {args.epochs}"):
            of = which[some]
            table, loss = step(table, queries.some(some), titles.some(of), of.astype(np.int32))
            if not begun:
                loss.block_until_ready()
                begun = time.perf_counter()  # it has compiled
    return table, (args.epochs * steps - 1) * batch / (time.perf_counter() - begun)


def recall(queries: np.ndarray, titles: np.ndarray, own: np.ndarray) -> float:
    """The share of queries ``(n, DIM)`` whose own title is among the ten nearest of all ``(m, DIM)``."""
    hits = 0
    for i in range(0, len(queries), 1024):
        scores = queries[i : i + 1024] @ titles.T
        of_own = np.take_along_axis(scores, own[i : i + 1024, None], 1)
        hits += int((np.sum(scores > of_own, axis=1) < 10).sum())
    return hits / len(queries)


def by_tf_idf(queries: Texts, titles: Texts, own: np.ndarray) -> float:
    known, which = np.unique(np.concatenate([t.keys[t.mask] for t in (queries, titles)]), return_inverse=True)
    ends = [np.concatenate([[0], np.cumsum(t.lengths)]) for t in (queries, titles)]
    parts = which[: ends[0][-1]], which[ends[0][-1] :]
    counts = [
        sparse.csr_matrix((np.ones(len(part)), part, end), (len(end) - 1, len(known)))
        for part, end in zip(parts, ends, strict=True)
    ]
    seen = np.asarray((counts[1] > 0).sum(0)).ravel()
    weights = sparse.diags(np.log((1 + counts[1].shape[0]) / (1 + seen)))
    spaces = [each @ weights for each in counts]
    q, t = (sparse.diags(1 / np.maximum(np.sqrt(each.multiply(each).sum(1).A1), 1e-9)) @ each for each in spaces)
    hits = 0
    for i in range(0, q.shape[0], 1024):
        scores = (q[i : i + 1024] @ t.T).toarray()
        of_own = np.take_along_axis(scores, own[i : i + 1024, None], 1)
        hits += int((np.sum(scores > of_own, axis=1) < 10).sum())
    return hits / q.shape[0]


def frozen_of(table: kvjax.Table, folder: str, least: int) -> kvjax.serving.FrozenTable:
    """The table for servers: without rows of parts that were seldom seen, and with zeros for parts without one."""
    rows = table.export(prune=kvjax.Prune(min_frequency=least))
    return kvjax.serving.FrozenTable.write(f"{folder}/part.frozen", rows, quantise="int8", missing="zeros")


def report(found: dict[str, Any], console: Console) -> None:
    table = Table(title="Titles found among the first ten")
    for column in ("", "recall @ 10", "rows", "bytes"):
        table.add_column(column, justify="left" if column == "" else "right")
    table.add_row("tf-idf of the same parts", f"{found['tf_idf']:.4f}")
    for name in ("table", "frozen"):
        row = found[name]
        table.add_row(name, f"{row['recall']:.4f}", f"{row['rows']:,}", f"{row['bytes']:,}")
    console.print(table)
    console.print(f"{found['waiting']:,} parts of one click alone have no row")
    console.print(f"{found['clicks_per_s']:,.0f} clicks a second in training")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="TSV", help="lines of a query, a tab and the title that was chosen")
    add("--titles", type=positive, default=10_000, help="made-up ones; there are twelve queries for each")
    add("--batch", type=positive, default=256, help="clicks a step")
    add("--epochs", type=positive, default=5)
    add("--min-frequency", type=natural, default=50, help="of the parts whose rows servers get")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a short run, to see that it works; no goal to reach")
    add("--json", type=writable, metavar="PATH", help="write the summary")
    return parsed(parser, titles=500, epochs=3)


def main() -> int:
    args, console = parse_arguments(), Console()
    clicks = read(args.data) if args.data else planted(args.titles, args.seed)
    if len(clicks.queries) < 20:
        sys.exit(f"want 20 clicks or more, got {len(clicks.queries)}")
    order = np.random.default_rng(args.seed + 1).permutation(len(clicks.queries))
    split = len(order) // 10
    test, training = (Clicks(*([of[i] for i in some] for of in clicks)) for some in (order[:split], order[split:]))
    table, rate = train(training, args)

    names = np.unique(clicks.titles)
    own, queries, titles = np.searchsorted(names, test.titles), Texts(test.queries), Texts(names.tolist())
    found: dict[str, Any] = {"tf_idf": by_tf_idf(queries, titles, own), "clicks_per_s": rate}
    spaces = [np.asarray(encode(table, *texts.some(slice(None)))) for texts in (queries, titles)]
    found["table"] = {"recall": recall(*spaces, own), "rows": len(table), "bytes": len(table) * DIM * 4}
    found["waiting"] = table.stats().tracked
    with tempfile.TemporaryDirectory() as folder:
        frozen = frozen_of(table, folder, args.min_frequency)
        spaces = [unit(frozen.lookup_bag(t.keys, mask=t.mask, combiner="sum"), np) for t in (queries, titles)]
        size = frozen.path.stat().st_size
    found["frozen"] = {"recall": recall(*spaces, own), "rows": len(frozen), "bytes": size}
    report(found, console)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.smoke or args.data:
        return 0
    mended = (found["table"]["recall"] - found["tf_idf"]) / (1 - found["tf_idf"])
    reached = mended >= GOAL and found["frozen"]["recall"] >= found["table"]["recall"] - 0.01
    console.print(f"{'Reached' if reached else 'MISSED'} the goal: {mended:.0%} of what tf-idf misses are found.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
