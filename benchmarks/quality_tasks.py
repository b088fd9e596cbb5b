"""What `quality.py` trains: a factorisation of users and items, and a factorisation machine of clicks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

TEMPERATURE, TOP = 0.1, 20


class Batch(NamedTuple):
    """Ids by table, and what the loss takes beside their rows."""

    ids: dict[str, np.ndarray]
    beside: Any


@dataclasses.dataclass(frozen=True)
class Task:
    """Attributes:
    metric: what `score` gives; more is better.
    rows: by table how many there are.
    spread: deviation of initial rows.
    rate: of Adam, in dense training.
    dense: parameters beside the rows.
    batches: by seed.
    loss: of rows of a batch by table ``(..., dim)``, dense parameters and what is beside.
    score: of all rows by table ``(n, dim)`` and dense parameters.
    """

    metric: str
    rows: dict[str, int]
    spread: float
    rate: float
    dense: Any
    batches: Callable[[int], Iterator[Batch]]
    loss: Callable[[dict[str, Any], Any, Any], Any]
    score: Callable[[dict[str, np.ndarray], Any], float]


def shuffled(n: int, size: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(n)
        yield from (order[begin : begin + size] for begin in range(0, n - size + 1, size))


# ---- users and items: an in-batch softmax, Recall@20 over all items ----------------------------------------


def items(path: str | None, users: int, size: int, epochs: int) -> Task:
    users, number, train, test = _split(path, users) if path else _groups(users)
    counts = np.bincount(train[:, 1], minlength=number).astype(np.float32)
    popularity = np.log(np.maximum(counts, 1) / len(train))

    def batches(seed: int) -> Iterator[Batch]:
        for some in shuffled(len(train), size, epochs, seed):
            pairs = train[some]
            yield Batch({"user": pairs[:, 0], "item": pairs[:, 1]}, popularity[pairs[:, 1]])

    def loss(rows: dict[str, Any], dense: Any, log_popularity: Any) -> Any:
        """Each pair against the items of the batch, corrected by how often these are drawn."""
        user, item = (x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) for x in (rows["user"], rows["item"]))
        logits = user @ item.T / TEMPERATURE - log_popularity[None]
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))

    def score(rows: dict[str, np.ndarray], dense: Any) -> float:
        return _recall(train, test, rows["user"], rows["item"])

    return Task(f"Recall@{TOP}", {"user": users, "item": number}, 0.1, 3e-3, (), batches, loss, score)


def _split(path: str, users: int) -> tuple[int, int, np.ndarray, np.ndarray]:
    """The first users of a split in CSR arrays: users, items, and pairs ``(n, 2)`` to train and to find."""
    arrays = np.load(path)

    def pairs(part: str) -> np.ndarray:
        ptr = arrays[f"{part}_ptr"][: users + 1].astype(np.int64)
        return np.stack([np.repeat(np.arange(users), np.diff(ptr)), arrays[f"{part}_item"][: ptr[-1]]], 1)

    users = min(users, len(arrays["train_ptr"]) - 1)
    return users, int(arrays["num_items"]), pairs("train"), pairs("test")


def _groups(users: int, items: int = 3000, groups: int = 30, each: int = 20) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Users like the items of two groups, some items more than others."""
    rng = np.random.default_rng(0)
    group, liked = rng.integers(0, groups, items), rng.integers(0, groups, (users, 2))
    fame = rng.pareto(1.2, items) + 0.1
    chosen = []
    for user in range(users):
        weight = fame * np.isin(group, liked[user])
        chosen.append(rng.choice(items, each, replace=False, p=weight / weight.sum()))
    pairs = np.stack([np.repeat(np.arange(users), each), np.concatenate(chosen)], 1)
    test = np.tile(np.arange(each) < each // 5, users)
    return users, items, pairs[~test], pairs[test]


def _recall(train: np.ndarray, test: np.ndarray, user: np.ndarray, item: np.ndarray) -> float:
    """Mean over users of the part of their test items among the first `TOP` that are not in training."""
    item = item / (np.linalg.norm(item, axis=1, keepdims=True) + 1e-6)
    found, total = 0.0, 0
    for begin in range(0, len(user), 500):
        rows = np.arange(begin, min(begin + 500, len(user)))
        scores = user[rows] @ item.T
        some = (train[:, 0] >= begin) & (train[:, 0] < begin + 500)
        scores[train[some, 0] - begin, train[some, 1]] = -np.inf
        top = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
        for row in rows:
            wanted = test[test[:, 0] == row, 1]
            if len(wanted):
                found, total = found + np.isin(wanted, top[row - begin]).sum() / len(wanted), total + 1
    return found / max(total, 1)


# ---- clicks: a factorisation machine, AUC ------------------------------------------------------------------


def clicks(path: str | None, examples: int, size: int, epochs: int) -> Task:
    (ids, label), (test_ids, test_label) = _logs(path) if path else _planted(examples)

    def batches(seed: int) -> Iterator[Batch]:
        for some in shuffled(len(ids), size, epochs, seed):
            yield Batch({"feature": ids[some]}, label[some])

    def logits(rows: Any, dense: Any) -> Any:
        """Of rows ``(n, fields, 1 + k)``: a bias and k factors each."""
        factors = rows[..., 1:]
        pairs = (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(-1) / 2
        return dense + rows[..., 0].sum(1) + pairs

    def loss(rows: dict[str, Any], dense: Any, label: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(logits(rows["feature"], dense), label).mean()

    def score(rows: dict[str, np.ndarray], dense: Any) -> float:
        return _auc(test_label, logits(rows["feature"][test_ids], np.asarray(dense)))

    number = 1 + max(int(ids.max()), int(test_ids.max()))
    return Task("AUC", {"feature": number}, 0.05, 1e-3, np.zeros((), np.float32), batches, loss, score)


def _logs(path: str, negatives: int = 2) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Logs of apps that were used, and beside each the same context with apps drawn at random."""
    arrays, app, cost = np.load(path), 8, 9  # columns
    train = arrays["train"].astype(np.int32)
    apps, first = np.unique(train[:, app], return_index=True)
    costs, rng = train[first, cost], np.random.default_rng(0)

    def labelled(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        others = np.repeat(logs, negatives, 0)
        drawn = rng.integers(0, len(apps), len(others))
        others[:, app], others[:, cost] = apps[drawn], costs[drawn]
        label = np.repeat([1.0, 0.0], [len(logs), len(others)]).astype(np.float32)
        return np.concatenate([logs, others]), label

    return labelled(train), labelled(arrays["test"].astype(np.int32))


def _planted(
    examples: int, fields: int = 6, categories: int = 3000, k: int = 4
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Clicks of a planted factorisation machine; few categories are frequent."""
    rng = np.random.default_rng(0)
    fame = 1 / np.arange(1, categories + 1)
    ids = rng.choice(categories, (examples, fields), p=fame / fame.sum()) + categories * np.arange(fields)
    bias, factors = rng.normal(0, 0.5, fields * categories), rng.normal(0, 0.4, (fields * categories, k))
    v = factors[ids]
    logit = -1 + bias[ids].sum(1) + ((v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)) / 2
    label = (rng.random(examples) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    tail = examples // 6
    ids = ids.astype(np.int32)
    return (ids[:-tail], label[:-tail]), (ids[-tail:], label[-tail:])


def _auc(label: np.ndarray, score: Any) -> float:
    """The chance that a click outscores another, a tie counting half."""
    _, place, ties = np.unique(np.asarray(score), return_inverse=True, return_counts=True)
    rank = (np.cumsum(ties) - (ties - 1) / 2)[place]
    n = label.sum()
    return float((rank[label > 0.5].sum() - n * (n + 1) / 2) / (n * (len(label) - n)))
