"""Options of tables: what is taken, what is refused, and what makes two tables the same."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import admit, evict
from tests.support.eviction import first

Host, Hybrid, Mmap = kvjax.storage.Host, kvjax.storage.Hybrid, kvjax.storage.Mmap


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dim": 0}, r"dim in 1\.\."),
        ({"dim": 2.5}, r"dim in 1\.\."),
        ({"dim": 2**62}, r"dim in 1\.\."),
        ({"dim": True}, r"dim in 1\.\."),
        ({"dim": 2, "seed": 1.5}, "an integer seed of at most 64 bits"),
        ({"dim": 2, "initializer": float("nan")}, "finite"),
        ({"initializer": 9.0}, "dim= beside"),
        ({"dim": 2, "dtype": "int8"}, "dtype in"),
        ({"dim": 2, "key_dtype": "float32"}, "key_dtype in"),
    ],
)
def test_bad_specs(options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.get_table("bad", **options)
    assert "bad" not in kvjax.tables()


@pytest.mark.parametrize(
    "options, mend",
    [
        ({"dim": 3.0}, "give dim=3"),
        ({"dim": 0}, "give the width of a row"),
        ({"initializer": "uniform"}, r"give kvjax.initializers.uniform\(\)"),
        ({"initializer": "glorot"}, "see kvjax.initializers"),
        ({"storage": "ssd"}, r"or give kvjax.storage.Mmap\('/a/folder'\) for rows on a disk"),
        ({"dtype": "int8"}, "quantise='int8' of exports and of FrozenTable.write"),
        ({"dtype": "float64"}, "choose one"),
        ({"key_dtype": "str"}, "strings become keys by kvjax.hash_keys"),
        ({"seed": jax.random.key(0)}, "give an int, such as the one that a key of JAX's was made from"),
        ({"seed": 2**64}, "see kvjax.get_table"),
        ({"on_full": "evit"}, "did you mean 'evict'. choose one"),
    ],
)
def test_bad_options_say_the_mend(options, mend):
    with pytest.raises((TypeError, ValueError), match=f"(?s)table 'bad', get_table: want .*, got .*; .*{mend}$"):
        kvjax.get_table("bad", **{"dim": 2} | options)


def test_a_folder_that_is_not_there(make, tmp_path):
    """Of a table that lives, nobody asks for its folder: the file has no name."""
    match = r"get_table: want a folder to make a file in, got '.*/not/there': No such file .*; make the folder first"
    with pytest.raises(ValueError, match=match):
        make(2, storage=Mmap(tmp_path / "not/there"))
    with pytest.raises(ValueError, match=match.replace("get_table", "to")):
        make(2).to(Mmap(tmp_path / "not/there"))
    (tmp_path / "gone").mkdir()
    table = kvjax.get_table("a", dim=2, storage=Mmap(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    assert kvjax.get_table("a", dim=2).upsert([1], [[1.0, 2.0]]).spec == table.spec


def test_storage_of_one_name_must_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = kvjax.get_table("a", dim=2, storage=Mmap(tmp_path))
    for same in (Mmap(str(tmp_path)), Mmap("."), Mmap(os.fsencode(tmp_path)), None):
        assert kvjax.get_table("a", dim=2, storage=same).spec == table.spec
    with pytest.raises(ValueError, match=r"table 'a', get_table: .* got storage Host\(huge_pages='auto'\) \(not Mmap"):
        kvjax.get_table("a", dim=2, storage=Host())
    with pytest.raises(ValueError, match="want dim= beside"):
        kvjax.get_table("a", storage=Host())
    with pytest.raises(ValueError, match=r"want one of kvjax\.storage"):
        kvjax.get_table("b", dim=2, storage="mmap")
    with pytest.raises(ValueError, match=r"want one of kvjax\.storage"):
        kvjax.get_table("b", dim=2, storage=[])
    assert hash(Mmap(".")) == hash(Mmap(tmp_path))


def test_bad_storages():
    with pytest.raises(ValueError, match="huge_pages 'auto', True or False, got 'never'"):
        Host(huge_pages="never")
    for path in ("a\0b", b"\xff"):
        with pytest.raises(ValueError, match=r"storage.Mmap: want a path(, got .* which has a zero byte| in UTF-8)"):
            Mmap(path)
    with pytest.raises(ValueError, match=r"storage.Mmap: want a path, got an empty one; give '\.'"):
        Mmap("")  # of a variable of the environment that is not set
    with pytest.raises(TypeError):
        Mmap(None)


def test_the_layers_take_a_storage(tmp_path):
    embed = kvjax.flax.Embed("linen", features=2, storage=Mmap(tmp_path))
    embed.init(jax.random.key(0), np.array([1]))
    kvjax.flax.nnx.Embed("nnx", 2, storage=Mmap(tmp_path))
    assert {t.spec.storage for t in kvjax.tables().values()} == {Mmap(tmp_path)}


def test_the_limit_is_a_number_of_bytes():
    assert Hybrid(0).text == "hybrid:0" and Hybrid(np.int64(5)) == Hybrid(device_bytes=5)
    for bad in (-1, 2.0**30, True, "1", None, 2**64):
        with pytest.raises(ValueError, match="want device_bytes as an integer from 0 to"):
            Hybrid(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evict": evict.MaxAge(3)}, "else it would never run"),
        ({"evict": 3}, "a policy of kvjax.evict"),
        ({"on_full": "evict"}, "max_capacity beside"),
        ({"on_full": "shrink"}, "on_full in"),
        ({"max_capacity": 0}, "max_capacity"),
        ({"max_capacity": -1}, "max_capacity"),
        ({"capacity": 2**33}, "capacity"),
        ({"evict": evict.LeastRecent().every(3)}, "a number of rows"),
        ({"count": "days"}, "count in"),
    ],
)
def test_bad_options_of_full_tables(options, message, make):
    with pytest.raises(ValueError, match=message):
        make(1, **options)


@pytest.mark.parametrize(
    "build",
    [
        lambda: evict.MaxAge(-1), lambda: evict.MinFrequency(1.5), lambda: evict.MinNorm(float("nan")),
        lambda: evict.LeastRecent(-1), lambda: evict.LeastFrequent(1, half_life=0), lambda: evict.LowestScore(1, 2),
        lambda: evict.MaxAge(1).every(0), lambda: evict.MinScore("x", first),
    ],
)  # fmt: skip
def test_bad_policies(build):
    with pytest.raises(ValueError, match=r"kvjax: evict\."):
        build()


def test_another_function_is_another_policy(make):
    def build():
        return {"max_capacity": 5, "on_full": "evict", "evict": evict.LowestScore(None, lambda rows: rows.freqs)}

    table = make(1, **build())
    with pytest.raises(ValueError, match="another function"):
        kvjax.get_table(table.name, dim=1, **build())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: admit.MinCount(0), "count >= 1"),
        (lambda: admit.MinCount(True), "count >= 1"),
        (lambda: admit.MinCount(2, unadmitted="mean"), "unadmitted"),
        (lambda: admit.MinCount(2, unadmitted=2**64), "unadmitted"),
        (lambda: admit.Sketch(2**16), r"count in 1\.\.65535"),
        (lambda: admit.Sketch(2, size=1000), "size"),
        (lambda: admit.Sketch(2, halve_every=0), "halve_every"),
        (lambda: admit.Probability(1.5), "0 <= p <= 1"),
    ],
)
def test_bad_admissions(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_admission_is_part_of_what_a_table_is(make):
    table = make(1, admit=admit.MinCount(2))
    assert kvjax.get_table(table.name, dim=1, admit=admit.MinCount(2)).name == table.name
    with pytest.raises(ValueError, match=r"admit MinCount\(count=3"):
        kvjax.get_table(table.name, dim=1, admit=admit.MinCount(3))
    with pytest.raises(ValueError, match="an admission of"):
        make(1, admit=3)


def called_back(row):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(row.shape, row.dtype), row)


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, row):
        return row


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounding": "up"}, "rounding in"),
        ({"rounding": "stochastic"}, r"rows of float32.*; leave it out, or give .*param_dtype='bfloat16'"),
        ({"constraint": lambda row: row[:1]}, r"float32\[4\] -> float32\[4\], got 'float32\[1\]'"),
        ({"constraint": lambda row: row.astype(jnp.bfloat16)}, r"got 'bfloat16\[4\]'"),
        ({"constraint": lambda a, b: a}, "TypeError"),
        ({"constraint": 1.0}, "constraint"),
        ({"constraint": called_back}, "under vmap NotImplementedError"),
        ({"constraint": Unhashable()}, "unhashable"),
    ],
)
def test_bad_roundings_and_constraints(options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.get_table("bad", dim=4, **options)
    with pytest.raises(ValueError, match="limit"):
        kvjax.constraints.max_norm(0.0)
    assert "bad" not in kvjax.tables()
