"""The reference model: what a table means, as a dict of NumPy rows. tests/table/test_stateful.py drives both."""

import dataclasses
import functools
from collections import Counter

import numpy as np

import kvjax
from tests.support.policies import chosen_rows, mix


@dataclasses.dataclass
class Row:
    value: np.ndarray
    frequency: int = 0
    version: int = 0
    slot: np.ndarray | None = None  # adagrad's sum of squares; None until an optimizer has run
    pinned: bool = False


class Full(Exception):
    """The table is full, and the write changes nothing."""


class Model:
    """A table of rows under integer keys. `initial(key)` gives the initial row of a key."""

    def __init__(self, dim, initial, *, admit=None, max_capacity=None, on_full="grow", evict=None, count="occurrences",
                 seed=0):  # fmt: skip
        self.dim, self.initial, self.admission = dim, initial, Admission(admit, seed)
        self.max_capacity, self.on_full, self.count = max_capacity, on_full, count
        timed = isinstance(evict, kvjax.evict.Every)
        self.policy, self.every = (evict.policy, evict.steps) if timed else (evict, None)
        self.rows: dict[int, Row] = {}
        self.last_step = 0
        self.gone: list[tuple[str, int, tuple, int, int]] = []  # what eviction took: reason, key, value, freq, version
        self.stats = Counter()

    # ---- reads

    def lookup(self, keys, mask=None, missing=None):
        rows = [self._read(k, missing) for k in keys]
        rows = np.array(rows, np.float32).reshape(len(keys), self.dim)
        return rows if mask is None else rows * np.asarray(mask, np.float32)[:, None]

    def _read(self, key, missing):
        if key in self.rows:
            return self.rows[key].value
        unadmitted = "init" if missing == "init" else missing or self.admission.unadmitted
        if missing is None and self.admission.reads_initial(key):
            return self.initial(key)
        if isinstance(unadmitted, str):
            return self.initial(key) if unadmitted == "init" else np.zeros(self.dim)
        return self.rows[unadmitted].value if unadmitted in self.rows else self.initial(unadmitted)

    def found(self, keys):
        return np.array([k in self.rows for k in keys], bool)

    def frequency(self, keys):
        count = self.admission.count
        return np.array([self.rows[k].frequency if k in self.rows else count(k) for k in keys], np.int64)

    def version_of(self, keys):
        return np.array([self.rows[k].version if k in self.rows else -1 for k in keys], np.int64)

    def pinned(self, keys):
        return np.array([k in self.rows and self.rows[k].pinned for k in keys], bool)

    def slot(self, keys):
        rows = [self.rows.get(k) for k in keys]
        zeros = np.zeros(self.dim, np.float32)
        slots = [row.slot if row is not None and row.slot is not None else zeros for row in rows]
        return np.array(slots, np.float32).reshape(len(keys), self.dim)

    # ---- rows coming and going

    def make_room(self, entering, staying, step=None, timed=False):
        """Evicts what must go before `entering` keys come, or raises Full."""
        after = len(self.rows) + len(entering)
        excess = max(after - self.max_capacity, 0) if self.max_capacity is not None else 0
        evicts = excess and self.on_full == "evict"
        due = timed and self.every and step // self.every > self.last_step // self.every
        step = self.last_step if step is None else step
        candidates = self.candidates(staying)
        going = []
        if (evicts or due) and self.policy is not None:
            going = chosen_rows(self.policy, candidates, step, excess if evicts else 0)
        missing = excess - len(going)
        if missing > 0 and self.on_full == "grow":
            self.stats["over_capacity"] += min(missing, len(entering))
        elif missing > 0:
            rest = {k: r for k, r in candidates.items() if k not in dict(going)}
            if self.on_full == "error" or len(rest) < missing:
                raise Full
            order = sorted(rest, key=lambda k: (rest[k].version, mix(k)))
            going = [*going, *((k, "capacity") for k in order[:missing])]
        self.take(going)

    def candidates(self, staying=()):
        """Rows that may go: those of the batch, pinned ones and the shared one stay."""
        stay = {*staying, self.admission.shared}
        return {k: r for k, r in self.rows.items() if not r.pinned and k not in stay}

    def take(self, going):
        for key, reason in going:
            row = self.rows.pop(key)
            self.gone.append((reason, key, tuple(row.value.tolist()), row.frequency, row.version))

    def insert(self, keys):
        new = dict.fromkeys(k for k in keys if k not in self.rows)
        self.make_room(new, set(keys))
        self._enter(new)

    def _enter(self, keys, trained=False):
        for k in keys:
            # Training counts what it gives rows.
            counted = 0 if trained else self.admission.count(k)
            self.rows[k] = Row(np.array(self.initial(k), np.float32), counted, self.last_step)
            self.admission.pending.pop(k, None)
            self.stats["inserted"] += 1

    # ---- writes

    def upsert(self, keys, values):
        self.insert(keys)
        self.assign(keys, values)

    def assign(self, keys, values):
        for k, value in zip(keys, values, strict=True):
            if k in self.rows:
                self.rows[k].value = np.array(value, np.float32)
                self.rows[k].version = self.last_step

    def add(self, keys, deltas):
        self.insert(keys)
        for k, delta in merged(keys, deltas).items():
            self.rows[k].value = self.rows[k].value + delta
            self.rows[k].version = self.last_step

    def accum(self, keys, old, new, exists):
        self.make_room({k for k, e in zip(keys, exists, strict=True) if k not in self.rows and not e}, set(keys))
        for k, before, after, e in zip(keys, old, new, exists, strict=True):
            if e and k in self.rows:
                self.rows[k].value = self.rows[k].value + (after - before)
                self.rows[k].version = self.last_step
            elif not e and k not in self.rows:
                self._enter([k])
                self.rows[k].value = np.array(after, np.float32)

    def remove(self, keys):
        for k in keys:
            self.stats["removed"] += self.rows.pop(k, None) is not None
            self.admission.pending.pop(k, None)

    def pin(self, keys, pinned=True):
        if pinned:
            self.insert(keys)
        for k in keys:
            if k in self.rows:
                self.rows[k].pinned = pinned

    def evict(self, policy, step=None):
        candidates = self.candidates()
        step = self.last_step if step is None else step
        self.take(chosen_rows(policy, candidates, step, 0))

    def victims(self, policy, step=None):
        """What a dry run of `evict` says: rows by the part of the policy that chooses them."""
        step = self.last_step if step is None else step
        reasons = Counter(reason for _, reason in chosen_rows(policy, self.candidates(), step, 0))
        return {repr(part): reasons[repr(part)] for part in policy.alternatives()}

    def restrict(self, n, by):
        order = sorted(self.candidates(), key=lambda k: (getattr(self.rows[k], by), mix(k)))
        self.take([(k, "restrict") for k in order[: max(len(self.rows) - n, 0)]])

    def clear(self):
        self.stats["removed"] += len(self.rows)
        self.rows.clear()
        self.admission.clear()
        self.last_step = 0

    def clear_slots(self):
        for row in self.rows.values():
            row.slot = None

    def apply(self, keys, grads, update, step=None):
        """update(value, slot, grad) -> (value, slot); duplicates are summed as `merged` does it."""
        step = self.last_step + 1 if step is None or step < self.last_step else step
        sums, counts = merged(keys, grads), Counter(keys)
        seen = {k: 1 if self.count == "batch" else n for k, n in counts.items()}
        totals = self.admission.decide({k: seen[k] for k in sums if k not in self.rows}, self.last_step, step)
        refused = [k for k in totals if not self.admission.enters(k, totals[k])]
        shared = self.admission.shared if refused else None
        entering = [k for k in totals if k not in refused]
        if shared is not None and shared not in self.rows and shared not in entering:
            entering.append(shared)
        self.make_room(entering, {*sums, shared}, step, timed=True)
        self.admission.commit(totals, refused)
        self._enter(entering, trained=True)
        pool, pooled = {}, 0
        for k, grad in sums.items():
            if shared is not None and (k in refused or k == shared):
                pool[k], pooled = grad, pooled + counts[k]
            elif k not in refused:
                self._train(k, grad, update, totals.get(k, seen[k]), step)
        if shared is not None:
            total = np.sum([pool[k] for k in sorted(pool, key=mix)], 0, np.float64).astype(np.float32)
            self._train(shared, total, update, 1 if self.count == "batch" else pooled, step)
        self.stats["refused"] += sum(counts[k] for k in refused)
        self.stats["admitted"] += len(totals) - len(refused)
        self.stats["occurrences"] += len(keys)
        self.stats["distinct"] += len(sums)
        self.last_step = max(self.last_step, step)

    def _train(self, key, grad, update, occurrences, step):
        row = self.rows[key]
        row.value, row.slot = update(row.value, row.slot, grad)
        row.frequency += occurrences
        row.version = step


def merged(keys, rows):
    """{key: sum of its rows in the order in which they stand, in blocks of 256}, in order of first occurrence."""
    of: dict[int, list[np.ndarray]] = {}
    for k, row in zip(keys, rows, strict=True):
        of.setdefault(k, []).append(np.array(row, np.float32))
    return {k: in_order([in_order(all_[b : b + 256]) for b in range(0, len(all_), 256)]) for k, all_ in of.items()}


def in_order(rows):
    """The rows added one after the other, in float32."""
    return functools.reduce(np.add, rows)


class Admission:
    """Counts of keys without a row, as kvjax.admit says."""

    def __init__(self, admit, seed):
        self.admit, self.seed = admit, seed
        self.pending: dict[int, int] = {}
        self.windows: dict[int, int] = {}  # in which waiting keys have last occurred
        self.window = 0
        self.cells: Counter = Counter()

    @property
    def unadmitted(self):
        return "init" if self.admit is None else self.admit.unadmitted

    @property
    def shared(self):
        return None if isinstance(self.unadmitted, str) else self.unadmitted

    def clear(self):
        self.pending.clear()
        self.cells.clear()

    def _cells(self, key):
        width = self.admit.cells // 4
        spread = mix(mix(key) ^ 0x5EED)
        return [(mix(key) % 2**16, row, (spread >> 16 * row) % width) for row in range(4)]

    def decide(self, seen, last_step, step):
        """Occurrences of new keys, this batch's included; nothing is counted yet."""
        self.halvings = 0
        if isinstance(self.admit, kvjax.admit.MinCount):
            every, most = self.admit.max_age, self.admit.max_waiting
            ends = step // every - last_step // every if every and step > last_step else 0
            if not ends and most and len(self.pending) + len(seen) > most:
                ends = 1
            self.next_window = self.window + ends
            forgets, oldest = every or most, self.next_window - 1
            self.waiting = {k: n for k, n in self.pending.items() if not forgets or self.windows[k] >= oldest}
            return {k: n + self.waiting.get(k, 0) for k, n in seen.items()}
        if isinstance(self.admit, kvjax.admit.Sketch):
            if self.admit.halve_every:
                self.halvings = max(step // self.admit.halve_every - last_step // self.admit.halve_every, 0)
            return {k: n + (min(self.cells[c] for c in self._cells(k)) >> self.halvings) for k, n in seen.items()}
        return dict(seen)

    def count(self, key):
        """Occurrences of a key without a row before this batch."""
        if isinstance(self.admit, kvjax.admit.Sketch):
            return min(self.cells[c] for c in self._cells(key))
        return self.pending.get(key, 0)

    def enters(self, key, total):
        return self.admits(key, total) if self.unadmitted == "init" else self.reads_initial(key)

    def reads_initial(self, key):
        """One occurrence more, of those to come, admits it."""
        return self.unadmitted == "init" or self.admits(key, self.count(key) + 1)

    def admits(self, key, total):
        if self.admit is None or key == self.shared:
            return True
        if isinstance(self.admit, kvjax.admit.Probability):
            return (mix(key + mix(self.seed ^ 0xAD317A11)) >> 11) * 2.0**-53 < self.admit.p
        return total >= self.admit.count

    def commit(self, totals, refused):
        if isinstance(self.admit, kvjax.admit.MinCount):
            self.pending = self.waiting | {k: totals[k] for k in refused}
            self.window = self.next_window
            self.windows |= dict.fromkeys(refused, self.window)
        if isinstance(self.admit, kvjax.admit.Sketch):
            self.cells = Counter({c: n >> self.halvings for c, n in self.cells.items()})
            for k, total in totals.items():
                for c in self._cells(k):
                    self.cells[c] = max(self.cells[c], min(total, self.admit.count))
