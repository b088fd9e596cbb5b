"""The reference model: what a table means, as a dict of NumPy rows. tests/test_stateful.py drives both."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Row:
    value: np.ndarray
    frequency: int = 0
    version: int = 0
    slot: np.ndarray | None = None  # adagrad's sum of squares; None until an optimizer has run


class Model:
    """A table of rows under integer keys. `initial(key)` gives the initial row of a key."""

    def __init__(self, dim, initial):
        self.dim, self.initial = dim, initial
        self.rows: dict[int, Row] = {}
        self.last_step = 0

    def lookup(self, keys):
        rows = [self.rows[k].value if k in self.rows else self.initial(k) for k in keys]
        return np.array(rows, np.float32).reshape(len(keys), self.dim)

    def found(self, keys):
        return np.array([k in self.rows for k in keys], bool)

    def frequency(self, keys):
        return np.array([self.rows[k].frequency if k in self.rows else 0 for k in keys], np.int64)

    def version_of(self, keys):
        return np.array([self.rows[k].version if k in self.rows else -1 for k in keys], np.int64)

    def insert(self, keys):
        for k in keys:
            if k not in self.rows:
                self.rows[k] = Row(self.initial(k).copy(), version=self.last_step)

    def upsert(self, keys, values):
        self.insert(keys)
        for k, value in zip(keys, values, strict=True):
            self.rows[k].value = np.array(value, np.float32)
            self.rows[k].version = self.last_step

    def remove(self, keys):
        for k in keys:
            self.rows.pop(k, None)

    def clear(self):
        self.rows.clear()
        self.last_step = 0

    def clear_slots(self):
        for row in self.rows.values():
            row.slot = None

    def apply(self, keys, grads, update, step=None):
        """update(value, slot, grad) -> (value, slot); duplicates are summed in the order in which they stand."""
        self.insert(keys)
        step = self.last_step + 1 if step is None else step
        sums: dict[int, np.ndarray] = {}
        for k, grad in zip(keys, grads, strict=True):
            sums[k] = sums[k] + grad if k in sums else np.array(grad, np.float32)
            self.rows[k].frequency += 1
        for k, grad in sums.items():
            row = self.rows[k]
            row.value, row.slot = update(row.value, row.slot, grad)
            row.version = step
        self.last_step = max(self.last_step, step)

    def contents(self):
        """{key: (value, frequency, version)}"""
        return {k: (tuple(r.value.tolist()), r.frequency, r.version) for k, r in self.rows.items()}
