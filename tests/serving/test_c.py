"""The C header reads frozen tables as kvjax does: rows to the bit, damage refused or within the file."""

import ctypes
import random
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.serving import FrozenError, FrozenTable
from kvjax.serving._search import unmixed
from tests.serving.test_damage import cut, exchange, flip, lose_a_part, swap_bytes
from tests.support.marks import examples, few, slow
from tests.support.tables import AWKWARD

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "examples/frozen_table.h"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-unused-function"]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "libfrozen.so"
    options = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-DFROZEN_API="]
    subprocess.run(["cc", *options, *WARNINGS, "-x", "c", str(HEADER), "-o", str(path), "-lm"], check=True)
    made = ctypes.CDLL(str(path))
    made.frozen_open.restype = ctypes.c_void_p
    made.frozen_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    made.frozen_close.argtypes = made.frozen_verify.argtypes = [ctypes.c_void_p]
    made.frozen_lookup.restype = ctypes.c_size_t
    pointers = [ctypes.c_void_p, ctypes.c_void_p]
    made.frozen_lookup.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *pointers]
    return made


def opened(library, path):
    """A table and why there is none."""
    why = ctypes.create_string_buffer(4096)
    return library.frozen_open(str(path).encode(), why, len(why)), why.value.decode()


def lookup(library, table, keys, dim):
    keys = np.ascontiguousarray(keys, np.int64)
    rows, found = np.full((len(keys), dim), np.nan, np.float32), np.full(len(keys), 2, np.uint8)
    count = library.frozen_lookup(table, keys.ctypes.data, len(keys), rows.ctypes.data, found.ctypes.data)
    assert count == found.sum()
    return rows, found.astype(bool)


def compare(library, frozen, keys):
    table, why = opened(library, frozen.path)
    assert table is not None, why
    rows, found = lookup(library, table, keys, frozen.dim)
    want, there = frozen.lookup(keys, return_found=True)
    np.testing.assert_array_equal(found, there)
    np.testing.assert_array_equal(rows.view(np.uint32), want.view(np.uint32))
    assert library.frozen_verify(table) == 1
    library.frozen_close(table)


@pytest.mark.parametrize("quantise", [None, "float16", "bfloat16", "int8"])
def test_rows_of_every_dtype(library, make, tmp_path, quantise):
    values = np.random.default_rng(0).normal(size=(5000, 7)).astype(np.float32) * np.logspace(-9, 3, 5000)[:, None]
    table = make(7, initializer=0.5).upsert(np.arange(5000) * 2**40 - 9, values)
    frozen = FrozenTable.write(tmp_path / "t", table, quantise=quantise)
    compare(library, frozen, np.concatenate([np.arange(-50, 5050) * 2**40 - 9, AWKWARD]))
    compare(library, frozen, [])


SEGMENTS = {"bias": (0, 0.25), "up": (slice(1, 4), kvjax.initializers.uniform(-1.0, 3.0))}
INITIALIZERS = {
    "constant": 0.1,
    "uniform": kvjax.initializers.uniform(-0.3, 0.7),
    "normal": kvjax.initializers.normal(0.1),
    "truncated": kvjax.initializers.truncated_normal(1e-5),
    "pool": np.random.default_rng(1).normal(size=(37, 7)).astype(np.float32),
    "segments": kvjax.initializers.segments(SEGMENTS, rest=kvjax.initializers.normal(1.0)),
}


@pytest.mark.parametrize("dtype", few(["float32", "float16", "bfloat16"], "float16"))
@pytest.mark.parametrize("kind", INITIALIZERS)
def test_initial_rows_to_the_bit(library, make, tmp_path, kind, dtype):
    table = make(7, initializer=INITIALIZERS[kind], seed=2**64 - 5, dtype=dtype).upsert(AWKWARD[:3], np.ones((3, 7)))
    keys = np.concatenate([AWKWARD, np.random.default_rng(2).integers(-(2**63), 2**63, 20_000)])
    compare(library, FrozenTable.write(tmp_path / "t", table), keys)
    compare(library, FrozenTable.write(tmp_path / "t", table, missing=np.arange(7.0)), keys)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 33, 1000])
def test_tables_of_any_size(library, make, tmp_path, n):
    table = make(1).upsert(np.arange(n), np.arange(n)[:, None])
    compare(library, FrozenTable.write(tmp_path / "t", table), np.arange(-5, n + 5))


@pytest.mark.parametrize("key_dtype", ["int32", "uint32", "uint64"])
def test_keys_of_other_widths(library, make, tmp_path, key_dtype):
    last = {"int32": -1, "uint32": 2**32 - 1, "uint64": 2**64 - 1}[key_dtype]
    ids = np.array([0, 7, 2**31 - 1, last], np.dtype(key_dtype))
    table = make(2, key_dtype=key_dtype, initializer=kvjax.initializers.normal(1.0)).upsert(ids, np.ones((4, 2)))
    frozen = FrozenTable.write(tmp_path / "t", table)
    handle, _ = opened(library, frozen.path)
    ids = np.concatenate([ids, np.array([5], ids.dtype)])
    rows, found = lookup(library, handle, ids.astype(np.int64), 2)
    np.testing.assert_array_equal(rows, frozen.lookup(ids))
    assert found.tolist() == [True] * 4 + [False]
    library.frozen_close(handle)


def test_a_key_whose_hash_is_the_last_one(library, make, tmp_path):
    """Which is what stands behind the hashes, too."""
    key = unmixed(np.array([2**64 - 1], np.uint64)).view(np.int64)
    table = make(1, initializer=0.5).upsert([1], [[2.0]])
    compare(library, FrozenTable.write(tmp_path / "t", table), np.concatenate([key, [1, 2]]))
    compare(library, FrozenTable.write(tmp_path / "t", table.upsert(key, [[3.0]])), np.concatenate([key, [1, 2]]))


@slow
@pytest.mark.skipif(shutil.which("localedef") is None, reason="there is nothing to make a locale with")
def test_a_locale_with_a_comma_changes_nothing(make, tmp_path):
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de")], capture_output=True)
    if not (tmp_path / "de").exists():
        pytest.skip(f"no locale: {made.stderr.decode()}")
    frozen = FrozenTable.write(tmp_path / "t", make(1, initializer=0.5))
    (tmp_path / "main.c").write_text(f'''#include "{HEADER}"
int main(int argc, char** argv) {{
  const int64_t key = 7;
  float row = 0;
  if (setlocale(LC_ALL, "de") == NULL || strtod("0.5", NULL) == 0.5) return 1;
  frozen_lookup(frozen_open(argv[argc - 1], NULL, 0), &key, 1, &row, NULL);
  return row == 0.5f ? 0 : 2;
}}''')
    subprocess.run(["cc", *WARNINGS, tmp_path / "main.c", "-o", tmp_path / "main", "-lm"], check=True)
    done = subprocess.run([tmp_path / "main", frozen.path], env={"LOCPATH": str(tmp_path)})
    assert done.returncode == 0


@pytest.mark.parametrize("standard", ["c99", "c11", "gnu17"])
def test_it_is_plain_c(tmp_path, standard):
    (tmp_path / "a.c").write_text(f'#include "{HEADER}"\nint main(void) {{ return frozen_open("", NULL, 0) != NULL; }}')
    subprocess.run(["cc", f"-std={standard}", *WARNINGS, tmp_path / "a.c", "-o", tmp_path / "a", "-lm"], check=True)
    assert subprocess.run([tmp_path / "a"]).returncode == 0


def test_why_a_file_is_refused(library, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_bytes(bytes(100))
    for name, why in (
        ("none", "it cannot be opened: No such file or directory"),
        ("empty", "it is no file, or an empty one"),
        ("", "it is no file, or an empty one"),
        ("other", "it does not begin as a frozen table"),
    ):
        assert opened(library, tmp_path / name) == (None, f"frozen table {tmp_path / name}: {why}")


@settings(max_examples=examples(1, 100))
@given(st.text(min_size=1, max_size=20), st.integers(0, 40), st.integers(0, 2**32))
def test_names_are_no_description(library, tmp_path_factory, name, n, seed):
    """JSON is read by its structure: whatever a name says, it is a name."""
    name = f'"dim": 9, "rows": 1}}] {name} \\'
    rows = np.random.default_rng(seed).normal(size=(n, 2))
    exported = kvjax.get_table("c", dim=2).upsert(np.arange(n), rows).export()
    kvjax.drop_table("c")
    path = tmp_path_factory.mktemp("names") / "t"
    compare(library, FrozenTable.write(path, exported, name=name, missing="zeros"), np.arange(-3, 45))


@slow
def test_damage_is_refused_or_within_the_file(tmp_path):
    """Under sanitizers, so that a read behind the file or a step too wide ends the program."""
    table = kvjax.get_table("c", dim=3, initializer=np.eye(3)).upsert(np.arange(200), np.ones((200, 3)))
    pool = FrozenTable.write(tmp_path / "pool", table, quantise="int8").path
    kvjax.drop_table("c")
    segments = kvjax.initializers.segments({"a": (0, 1.0)}, rest=kvjax.initializers.normal(1.0))
    table = kvjax.get_table("c", dim=3, initializer=segments).upsert(np.arange(200), np.ones((200, 3)))
    made = [pool.read_bytes(), FrozenTable.write(tmp_path / "segments", table).path.read_bytes()]
    (tmp_path / "main.c").write_text(f'''#include "{HEADER}"
int main(int argc, char** argv) {{
  int64_t keys[300];
  char why[99];
  int refused = 0;
  for (int i = 0; i < 300; ++i) keys[i] = i - 50;
  for (int i = 1; i < argc; ++i) {{
    frozen_table* t = frozen_open(argv[i], why, sizeof(why));
    if (t == NULL) {{
      ++refused;
      continue;
    }}
    float* rows = (float*)malloc(300 * sizeof(float) * t->dim);
    frozen_lookup(t, keys, 300, rows, NULL);
    if (!frozen_verify(t)) ++refused;
    free(rows);
    frozen_close(t);
  }}
  printf("%d", refused);
}}''')
    program = tmp_path / "main"
    sanitizers = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["cc", *sanitizers, *WARNINGS, tmp_path / "main.c", "-o", program, "-lm"], check=True)
    rng, damaged, forged = random.Random(0), [tmp_path, tmp_path / "none"], []

    def written(data):
        path = tmp_path / f"{len(damaged)}-{len(forged)}"
        path.write_bytes(data)
        return path

    for data in made:
        for kind in [flip, cut, lose_a_part, swap_bytes, exchange] * examples(20, 200):
            damaged.append(written(kind(rng, data)))
        at = data.rindex(b'{"bits"')
        for _ in range(examples(100, 1000)):  # of a description whose digest is right
            forged.append(written(_with_description(data[:at], flip(rng, data[at:-16]))))

    def refused(paths):
        done = subprocess.run([program, *paths], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return int(done.stdout)

    assert refused(damaged) == 2 + sum(map(_refuses, damaged[2:])) > 0.9 * len(damaged)
    assert refused(forged) > 0.5 * len(forged)


def _refuses(path):
    """Whether kvjax does."""
    try:
        FrozenTable.open(path, verify=True)
    except FrozenError:
        return True
    return False


def _with_description(arrays, description):
    tail = len(description).to_bytes(4, "little") + zlib.crc32(description).to_bytes(4, "little")
    return arrays + description + tail + b"kvjaxFTe"


def test_the_example_of_the_document(make, tmp_path):
    text = (ROOT / "docs/frozen-format.md").read_text()
    (code,) = re.findall(r"```c\n(.*?)```", text, re.S)
    lines = re.search(r"```sh\n(\$ cc .*?)```", text, re.S)[1].splitlines()
    (tmp_path / "lookup.c").write_text(code)
    shutil.copy(HEADER, tmp_path)
    FrozenTable.write(tmp_path / "user.frozen", make(2, initializer=0.5).upsert([7, 2**40], [[1.0, 2.0], [3.0, 4.0]]))
    printed = []
    for line in lines:
        if line.startswith("$ "):
            done = subprocess.run(line[2:], shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
            assert done.stderr == ""
            printed += [line, *done.stdout.splitlines()]
    assert printed == lines and len(lines) > 3


def test_it_is_cpp_too(tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "a.cc").write_text(
        f'#include "{HEADER}"\nint main() {{ return frozen_open("", nullptr, 0) != nullptr; }}'
    )
    subprocess.run(["c++", "-std=c++20", *WARNINGS, tmp_path / "a.cc", "-o", tmp_path / "a"], check=True)
    assert subprocess.run([tmp_path / "a"]).returncode == 0


def test_initial_rows_are_those_of_the_table(library, make, tmp_path):
    """And not only those of the NumPy reader."""
    table = make(5, initializer=kvjax.initializers.normal(1.0))
    handle, _ = opened(library, FrozenTable.write(tmp_path / "t", table).path)
    keys = np.random.default_rng(3).integers(-(2**63), 2**63, 1000)
    rows, found = lookup(library, handle, keys, 5)
    np.testing.assert_array_equal(rows, jax.device_get(table.lookup(keys)))
    assert not found.any()
    library.frozen_close(handle)
