"""Interactions for ``two_tower.py``: a synthetic stream, Gowalla, batches, and the full-ranking metrics."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
from arguments import arrays_of

import kvjax


@dataclasses.dataclass(frozen=True)
class Data:
    """Who met what. All ids are raw 64-bit values; nothing here is a vocabulary the model could lean on."""

    name: str
    users: np.ndarray  # `(n,)` int64, the training interactions, in time order if `ordered`
    items: np.ndarray  # `(n,)` int64
    test_users: np.ndarray  # `(m,)` int64, the held-out later interactions
    test_items: np.ndarray  # `(m,)` int64
    catalogue: np.ndarray  # `(c,)` int64, sorted: every item that could be recommended
    ordered: bool  # a stream is read in its order; a set without times is shuffled anew each epoch

    def renumbered(self) -> Data:
        """The same interactions with ids 0..n-1, which a table of fixed size needs to know beforehand."""
        everyone = np.unique(np.concatenate([self.users, self.test_users]))
        return dataclasses.replace(
            self,
            users=np.searchsorted(everyone, self.users),
            items=np.searchsorted(self.catalogue, self.items),
            test_users=np.searchsorted(everyone, self.test_users),
            test_items=np.searchsorted(self.catalogue, self.test_items),
            catalogue=np.arange(self.catalogue.size),
        )


def synthetic(seed: int, events: int, users: int, items: int, genres: int, rank: int = 6) -> Data:
    """A stream in which users and items are born all along, with a planted low-rank taste for genres.

    An event picks a user alive by then, a genre by that user's taste, and an item of the genre alive by then
    by its popularity. Each choice is an inverse CDF over a prefix, so a million events take a second.
    """
    rng = np.random.default_rng(seed)
    time = np.linspace(0.0, 1.0, events)
    ids = rng.integers(-(2**63), 2**63 - 1, users + items)  # as real ids are: any 64 bits, negative ones too

    born = np.sort(rng.uniform(-0.25, 0.95, users))  # a fifth are there at the start, the rest arrive
    activity = np.cumsum(rng.lognormal(0.0, 1.0, users))
    alive = np.searchsorted(born, time, side="right")
    user = np.searchsorted(activity, rng.random(events) * activity[alive - 1], side="right")

    taste = rng.normal(size=(users, rank)) @ rng.normal(size=(rank, genres)) * (3.0 / rank**0.5)
    chance = np.exp(taste - taste.max(1, keepdims=True))
    edges = np.cumsum(chance / chance.sum(1, keepdims=True), axis=1) + np.arange(users)[:, None]
    place = np.searchsorted(edges.ravel(), user + rng.random(events))  # user u's CDF rises from u to u + 1
    genre = np.minimum(place - user * genres, genres - 1)

    home = np.sort(np.concatenate([np.arange(genres), rng.integers(0, genres, items - genres)]))
    first = np.searchsorted(home, np.arange(genres))
    birth = rng.uniform(-0.25, 0.95, items).clip(0.0)
    birth[first] = 0.0  # so that no genre is ever empty
    order = np.lexsort((birth, home))
    weight = np.concatenate([[0.0], np.cumsum(rng.lognormal(0.0, 1.5, items))])
    alive = np.searchsorted((home + birth)[order], genre + time, side="right")
    low, high = weight[first[genre]], weight[alive]
    item = np.searchsorted(weight, low + rng.random(events) * (high - low), side="right") - 1

    once = np.sort(np.unique(user * items + item, return_index=True)[1])  # a repeat does not count
    user, item, time = ids[user[once]], ids[users + item[once]], time[once]
    past = time < 0.85
    test = ~past & np.isin(user, user[past])  # what comes next for users met by then; its items may be new
    return Data("synthetic", user[past], item[past], user[test], item[test], np.sort(ids[users:]), ordered=True)


def gowalla(path: pathlib.Path) -> Data:
    """Gowalla in LightGCN's split (`train_ptr, train_item, ...` as CSR), its ids hashed to 64 bits."""
    _check_gowalla(path)
    with np.load(path) as f:
        count = int(f["num_users"])
        users = kvjax.hash_keys(np.arange(count), salt=1)  # the salts keep user 7 and item 7 apart
        items = kvjax.hash_keys(np.arange(int(f["num_items"])), salt=2)
        train, test = (np.repeat(users, np.diff(f[part].astype(np.int64))) for part in ("train_ptr", "test_ptr"))
        train_items, test_items = items[f["train_item"]], items[f["test_item"]]
    return Data("gowalla", train, train_items, test, test_items, np.sort(items), ordered=False)


def _check_gowalla(path: pathlib.Path) -> None:
    """Ends the program with a sentence if the file is another."""
    got = arrays_of(path, "num_users", "num_items", "train_ptr", "train_item", "test_ptr", "test_item")
    for part in ("train", "test"):
        pointers, items = got[f"{part}_ptr"], got[f"{part}_item"]
        if pointers.shape != (int(got["num_users"]) + 1,) or items.shape != (int(pointers[-1]),):
            raise SystemExit(
                f"{path}: want {part}_ptr (num_users + 1,) and as many {part}_item as its last says, got shapes "
                f"{pointers.shape} and {items.shape} for {got['num_users']} users"
            )
        if items.size and not 0 <= items.min() <= items.max() < int(got["num_items"]):
            raise SystemExit(f"{path}: want {part}_item from 0 to num_items - 1, got {items.min()} to {items.max()}")


def batches(data: Data, size: int, seed: int, start: int, stop: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches `start` to `stop`, each a function of `(seed, step)` alone, so a resumed run sees the same."""
    per_epoch = data.users.size // size
    epoch, order = -1, np.arange(data.users.size)
    for step in range(start, stop):
        if step // per_epoch != epoch and not data.ordered:
            epoch = step // per_epoch
            order = np.random.default_rng((seed, epoch)).permutation(data.users.size)
        rows = order[step % per_epoch * size :][:size]
        yield data.users[rows], data.items[rows]


def recall_and_ndcg(
    data: Data, users: np.ndarray, rows: np.ndarray, items: np.ndarray, k: int = 20
) -> tuple[float, float]:
    """Recall@k and NDCG@k over the whole catalogue, as LightGCN counts them.

    users: `(u,)` ids, sorted, all in the test; rows: `(u, dim)`, theirs; items: `(c, dim)`, the catalogue's.
    What a user met in training is not recommended again; the ideal DCG has min(k, relevant) hits.
    """
    seen_ptr, seen = _by_user(users, data.users, np.searchsorted(data.catalogue, data.items))
    want_ptr, want = _by_user(users, data.test_users, np.searchsorted(data.catalogue, data.test_items))
    relevant = np.diff(want_ptr)
    gain = 1.0 / np.log2(np.arange(2, k + 2))
    ideal = np.cumsum(gain)[np.minimum(relevant, k) - 1]
    recall, ndcg = np.zeros(users.size), np.zeros(users.size)
    for low in range(0, users.size, 256):
        block = slice(low, low + 256)
        scores = rows[block] @ items.T
        here, n = np.arange(scores.shape[0]), scores.shape[0]
        scores[np.repeat(here, np.diff(seen_ptr)[block]), seen[seen_ptr[low] : seen_ptr[low + n]]] = -np.inf
        wanted = np.zeros(scores.shape, bool)
        wanted[np.repeat(here, relevant[block]), want[want_ptr[low] : want_ptr[low + n]]] = True
        top = np.argpartition(scores, -k)[:, -k:]
        top = np.take_along_axis(top, np.argsort(-np.take_along_axis(scores, top, 1), kind="stable"), 1)
        hit = np.take_along_axis(wanted, top, 1)
        recall[block] = hit.sum(1) / relevant[block]
        ndcg[block] = hit @ gain / ideal[block]
    return float(recall.mean()), float(ndcg.mean())


def _by_user(users: np.ndarray, who: np.ndarray, what: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`what` grouped by the user in `who`, as CSR over the sorted `users`; others are left out."""
    at = np.searchsorted(users, who).clip(max=users.size - 1)
    known = users[at] == who
    at, what = at[known], what[known]
    order = np.argsort(at, kind="stable")
    return np.concatenate([[0], np.cumsum(np.bincount(at, minlength=users.size))]), what[order]
