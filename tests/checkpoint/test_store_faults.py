"""Stores that fail, refuse or answer slowly: nothing is damaged by it, errors say so, and little is asked."""

import errno
import os
import threading

import numpy as np
import pytest

import kvjax
from kvjax._command.main import main
from kvjax._formats.paths import anywhere
from kvjax.checkpoint import CheckpointError, prune, restore, save, verify

ROOT = "gs://bucket/run"


@pytest.mark.parametrize("kept", ["kvjax.json", "{}/kvjax.json"])
def test_a_save_that_fails_and_cannot_remove_all_leaves_nothing_damaged(store, table, monkeypatch, kept):
    """Either the new checkpoint is whole, or it is passed over: a manifest without its files would be damage."""
    save(f"{ROOT}/1", [table])
    whole, kept = table.remove(np.array([5])), f"/bucket/run/2/{kept.format(table.name)}"

    def fault(what, path):
        if what == "remove" and path == kept:
            raise ConnectionError("the store is gone")

    def fail(_):
        raise KeyboardInterrupt

    store.fault = fault
    monkeypatch.setattr("kvjax._formats.atomic.NewInStore.install", fail)
    with pytest.raises(KeyboardInterrupt):
        save(f"{ROOT}/2", [whole])
    store.fault = None
    assert kept in store.store
    rows = 39 if kept == "/bucket/run/2/kvjax.json" else 40
    assert len(restore(ROOT, {table.name: "back"})[table.name]) == rows


@pytest.mark.parametrize("broken", [lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:]])
@pytest.mark.parametrize("file", ["kvjax.json", "{}/kvjax.json", "{}/shard-00000-of-00001/values/c.0.0"])
def test_a_read_that_goes_wrong_once_is_no_damage(store, table, file, broken):
    """Of each file the first one does: the store has it whole."""
    save(f"{ROOT}/1", [table])
    read = []

    def fault(what, path):
        if what == "read" and path == f"/bucket/run/1/{file.format(table.name)}" and path not in read:
            read.append(path)
            return broken
        return None

    store.fault = fault
    for call in (lambda: restore(ROOT, {table.name: "back"}), lambda: verify(f"{ROOT}/1").ok or pytest.fail()):
        call()
        assert read.pop()


def test_a_file_that_is_longer_is_not_read_to_its_end(store, table, monkeypatch):
    save(f"{ROOT}/1", [table])
    (path,) = (path for path in store.store if path.endswith("/values/c.0.0"))
    store.store[path].seek(0, 2)
    store.store[path].write(bytes(1 << 20))
    sizes, real = [], store.cat_file
    monkeypatch.setattr(store, "cat_file", lambda *args, **k: sizes.append(len(data := real(*args, **k))) or data)
    assert not verify(f"{ROOT}/1").ok and max(sizes) < 1 << 20
    with pytest.raises(CheckpointError, match=r"want shard-00000-of-00001/values/c\.0\.0 with \d+ bytes, got"):
        restore(f"{ROOT}/1")


def test_a_full_disk_of_temporary_files_is_not_called_the_stores(store, table, monkeypatch):
    export = table.export()
    export.to_npz(f"{ROOT}/x.npz")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = r"in a temporary file \(TMPDIR says where\): No space left on device; make space there"
    monkeypatch.setattr(store, "get_file", fail)
    with pytest.raises(OSError, match=f"kvjax: from_npz, {where}"):
        kvjax.convert.from_npz(f"{ROOT}/x.npz")
    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", fail)
    with pytest.raises(OSError, match=f"kvjax: write, {where}"):
        export.to_npz(f"{ROOT}/x.npz")


def test_only_the_last_of_many_is_looked_at(store, table):
    """However many there are: a store takes its time for each answer."""
    save(f"{ROOT}/0", [table])
    for path, file in list(store.store.items()):
        for step in range(1, 40):
            store.store[path.replace("/run/0/", f"/run/{step}/")] = file
    asked = []

    def fault(what, path):
        asked.append(what)
        assert f"{path}/".startswith("/bucket/run/39/") or path == "/bucket/run" or "_METADATA" in path, path

    store.fault = fault
    assert len(restore(ROOT, {table.name: "back"})[table.name]) == 40 and len(asked) < 30
    assert "look" not in asked
    store.fault = None
    store.store["/bucket/run/40/.kvjax-new"] = file  # another save, which is under way
    assert verify(ROOT).path == anywhere(f"{ROOT}/39", "test")


def test_verify_and_inspect_ask_little(store, table, capsys):
    """Several files are read at once, and sizes come from one listing."""
    save(f"{ROOT}/1", [table])
    asked, begun, two = [], [], threading.Event()

    def fault(what, path):
        asked.append(what)
        if path.endswith("/zarr.json") and what == "read":
            begun.append(path)
            if len(begun) == 2:
                two.set()
            assert two.wait(20)  # for another, which begins before this one ends

    store.fault = fault
    assert verify(f"{ROOT}/1").ok and "look" not in asked
    asked.clear()
    assert main(["inspect", ROOT]) == 0 and table.name in capsys.readouterr().out and asked.count("look") <= 1


def test_many_steps_of_a_manager(store, table):
    """More than there are threads, each with folders that are looked at."""
    save(f"{ROOT}/0/tables", [table])
    for path, file in list(store.store.items()):
        for step in range(1, 40):
            store.store[path.replace("/run/0/", f"/run/{step}/")] = file
    assert verify(ROOT).path == anywhere(f"{ROOT}/39/tables", "test")
    assert len(restore(f"{ROOT}/7/tables", {table.name: "back"}, base=ROOT)[table.name]) == 40


def test_a_store_that_cannot_be_reached(store, table):
    """It is not one where nothing is."""
    save(f"{ROOT}/1", [table])
    store.fault = lambda *_: 1 / 0
    for call in (lambda: restore(ROOT), lambda: save(f"{ROOT}/2", [table]), lambda: verify(f"{ROOT}/1")):
        with pytest.raises(OSError, match=r"want to .*gs://bucket/.*got ZeroDivisionError from"):
            call()


def test_credentials_that_cannot_delete(store, table):
    """A checkpoint is whole once it has its manifest."""

    def fault(what, path):
        if what == "remove":
            raise PermissionError("Forbidden")

    store.fault = fault
    save(f"{ROOT}/1", [table])
    assert "/bucket/run/1/.kvjax-new" in store.store
    assert len(restore(ROOT, {table.name: "back"})[table.name]) == 40 and verify(f"{ROOT}/1").ok
    with pytest.raises(CheckpointError, match="which exists, and nothing in a store can be replaced"):
        save(f"{ROOT}/1", [table])


class Refused(Exception):
    status_code = 403


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), OSError("Forbidden: bucket"), Refused("no")])
def test_credentials_for_what_begins_with_a_path(store, table, tmp_path, error):
    """What is around that cannot be shown to be a checkpoint; what is in it has to be readable."""
    save(f"{ROOT}/0", [table], cursor="c")
    hidden = [f"{ROOT}/other", "gs://bucket/more/0"]
    for place in hidden:
        save(place, [table])

    def fault(what, path):
        if not f"{path}/".startswith("/bucket/run/") or path.startswith("/bucket/run/other/"):
            raise error
        if path == "/bucket/run" and what != "list":
            raise error

    store.fault = fault
    table = table.remove(np.array([5]))
    save(f"{ROOT}/1", [table], since="c")
    assert len(restore(f"{ROOT}/1", {table.name: "back"})[table.name]) == 39
    prune(f"{ROOT}/1", f"{ROOT}/few/2", kvjax.Prune(top_k=3))
    assert len(restore(f"{ROOT}/few", {table.name: "few"})[table.name]) == 3 and verify(f"{ROOT}/1").ok
    kvjax.convert.export_checkpoint(f"{ROOT}/1", f"{ROOT}/x.npz")
    for place in hidden:
        with pytest.raises(PermissionError, match=rf"want to (read|list) {place}.*the credentials allow that"):
            restore(place)
    with pytest.raises(PermissionError, match="want to look for gs://bucket/more/1"):
        save("gs://bucket/more/1", [table])


def test_a_store_whose_client_cannot_be_made(store, table, monkeypatch):
    def fail(*_, **__):
        raise TypeError("want a host")

    monkeypatch.setattr(store, "__init__", fail)
    store.clear_instance_cache()
    with pytest.raises(OSError, match=r"^kvjax: save: want the client of gs://x/y, got TypeError: want a host; see"):
        save("gs://x/y", [table])


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize("error, text", [
    (NoCredentialsError("none"), "NoCredentialsError from the store: none; set the credentials where"),
    (NotImplementedError(), "NotImplementedError from the store; the store's package cannot do that: give a path"),
])  # fmt: skip
def test_errors_of_stores_say_what_to_do(store, table, error, text):
    def fault(*_):
        raise error

    store.fault = fault
    with pytest.raises(OSError, match=text):
        restore(f"{ROOT}/1")


@pytest.mark.parametrize("suffix", ["npz", "parquet", "safetensors"])
def test_errors_of_files_name_them_and_no_copy(store, suffix):
    place = f"{ROOT}/x.{suffix}"
    anywhere(place, "test").write_bytes(b"other")
    with pytest.raises(kvjax.convert.FileError, match=rf"^kvjax: {place}: want "):
        getattr(kvjax.convert, f"from_{suffix}")(place)
