"""Engines of rows for tests: a dict, which can be told to fail."""

import contextlib

import numpy as np


class Memory:
    """An engine of `kvjax.storage.External` in a dict."""

    def __init__(self):
        self.rows = {"values": {}, "slots": {}}
        self.failures = ()

    def columns(self):
        return {column: set(rows) for column, rows in self.rows.items()}

    @contextlib.contextmanager
    def failing(self, *calls):
        self.failures = calls
        yield
        self.failures = ()

    def _may(self, call, keys):
        assert keys.dtype == np.uint64 and len(np.unique(keys)) == len(keys) > 0
        if call in self.failures:
            raise ConnectionError("the server is gone")

    def get(self, column, keys):
        self._may("get", keys)
        return np.stack([self.rows[column][key] for key in keys.tolist()])

    def put(self, column, keys, rows):
        self._may("put", keys)
        for key, row in zip(keys.tolist(), rows, strict=True):
            self.rows[column][key] = row.copy()

    def delete(self, keys):
        self._may("delete", keys)
        for key in keys.tolist():
            self.rows["values"].pop(key, None)
            self.rows["slots"].pop(key, None)
