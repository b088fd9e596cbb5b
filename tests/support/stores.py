"""An object store in memory, as fsspec reaches those of others."""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Objects(MemoryFileSystem):
    """There are no folders but those of its files, and it is gone after `writes_left` more writes."""

    protocol = ("gs", "gcs")
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    writes_left = None

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
        return super().pipe_file(path, value, mode, **kwargs)


def begin():
    """Gives an empty store as gs://."""
    Objects.store, Objects.pseudo_dirs, Objects.writes_left = {}, [""], None
    for name in Objects.protocol:
        fsspec.register_implementation(name, Objects, clobber=True)
    return Objects


def files_of(store, folder):
    """The bytes of the files in a folder of a store, by their paths below it."""
    root = f"/{folder}/"
    return {path.removeprefix(root): file.getvalue() for path, file in store.items() if path.startswith(root)}
