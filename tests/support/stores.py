"""An object store in memory, as fsspec reaches those of others."""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Objects(MemoryFileSystem):
    """There are no folders but those of its files, and it is gone after `writes_left` more writes.

    fault(what, path) is called with each request. It may raise an error, or give a function of the bytes that are read.
    """

    protocol = ("gs", "gcs")
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    writes_left = fault = None

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("gs://").removeprefix("gcs://").strip("/")
        return f"/{path}" if path else ""

    def makedirs(self, path, exist_ok=False):
        pass

    def mkdir(self, path, create_parents=True, **kwargs):
        pass

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if Objects.writes_left is not None:
            if Objects.writes_left == 0:
                raise ConnectionError("the store is gone")
            Objects.writes_left -= 1
        self._asked("write", path)
        return super().pipe_file(path, value, mode, **kwargs)

    def info(self, path, **kwargs):
        self._asked("look", path)
        return super().info(path, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._asked("list", path)
        return super().ls(path, detail, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        changed = self._asked("read", path)
        data = super().cat_file(path, start, end, **kwargs)
        if end is not None and not data:
            raise OSError("want a range of an empty file")
        return changed(data) if changed else data

    def rm_file(self, path):
        self._asked("remove", path)
        self._rm(path)

    @classmethod
    def _asked(cls, what, path):
        return cls.fault and cls.fault(what, cls._strip_protocol(path))


def begin():
    """Gives an empty store as gs://."""
    Objects.store, Objects.pseudo_dirs, Objects.writes_left, Objects.fault = {}, [""], None, None
    for name in Objects.protocol:
        fsspec.register_implementation(name, Objects, clobber=True)
    return Objects


def files_of(store, folder):
    """The bytes of the files in a folder of a store, by their paths below it."""
    root = f"/{folder}/"
    return {path.removeprefix(root): file.getvalue() for path, file in store.items() if path.startswith(root)}
