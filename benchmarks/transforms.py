"""Row programs of ten optax transforms, each beside a kernel written by hand, on one thread in turns.

    python benchmarks/transforms.py                # a minute; builds two C++ files with c++ first
    python benchmarks/transforms.py --smoke        # tiny sizes, to see that it runs

It wants an x86 processor and GCC. Both visit the same random rows and count them; the kernel by hand is made for its
dim and for this processor. Rows are compared at the end. Time is that of the processor, ns a row, the median of turns.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import math
import mmap
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import kvjax
from kvjax._training.rowwise import rowwise
from kvjax._training.update import lowered

ROOT = Path(__file__).parents[1]
LR, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 1e-4
# By hand the rates are lr, b1 (or decay), b2, eps and weight decay.
TRANSFORMS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "sgd": (optax.sgd(LR), (LR, 0, 0, 0, 0)),
    "momentum": (optax.sgd(LR, B1), (LR, B1, 0, 0, 0)),
    "adagrad": (optax.adagrad(LR, eps=1e-7), (LR, 0, 0, 1e-7, 0)),
    "rmsprop": (optax.rmsprop(LR, B1, EPS), (LR, B1, 0, EPS, 0)),
    "adam": (optax.adam(LR, B1, B2, EPS), (LR, B1, B2, EPS, 0)),
    "adamw": (optax.adamw(LR, B1, B2, EPS, weight_decay=DECAY), (LR, B1, B2, EPS, DECAY)),
    "nadam": (optax.nadam(LR, B1, B2, EPS), (LR, B1, B2, EPS, 0)),
    "amsgrad": (optax.amsgrad(LR, B1, B2, EPS), (LR, B1, B2, EPS, 0)),
    "lion": (optax.lion(LR, B1, 0.99, weight_decay=DECAY), (LR, B1, 0.99, 0, DECAY)),
    "lamb": (optax.lamb(LR, B1, B2, EPS), (LR, B1, B2, EPS, 0)),
}


class Rows(ctypes.Structure):
    """As in transforms_by_hand.cc."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "slots", "headers", "ids", "gradients")] + [
        (name, ctypes.c_int64) for name in ("n", "stride", "step")
    ]


def built(folder: Path, level: str = "-O3") -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The library with the table's row pass, and that of the kernels by hand."""
    common = ["c++", "-std=gnu++20", level, "-fPIC", f"-I{ROOT}"]
    fast = ["-fno-math-errno", "-fno-trapping-math"]
    program, kernels = ROOT / "benchmarks/transforms_program.cc", ROOT / "kvjax/ffi/cpu/program"
    wide = ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mprefer-vector-width=512"]
    flags = {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma"],
        "avx512": ["-mavx2", "-mfma", *wide],
    }  # as cmake/kernels.cmake
    objects = []
    for name, isa in flags.items():
        objects.append(f"{folder}/{name}.o")
        compile_one = [*common, "-c", "-ffp-contract=off", *fast, *isa, f"{kernels}/{name}.cc"]
        subprocess.run([*compile_one, "-o", objects[-1]], check=True)
    subprocess.run(
        [*common, "-shared", "-ffp-contract=off", str(program), *objects, "-o", f"{folder}/program.so"], check=True
    )
    native = [*fast, "-march=native", "-mprefer-vector-width=512", str(program).replace("program", "by_hand")]
    subprocess.run([*common, "-shared", *native, "-o", f"{folder}/by_hand.so"], check=True)
    return ctypes.CDLL(f"{folder}/program.so"), ctypes.CDLL(f"{folder}/by_hand.so")


@dataclasses.dataclass(frozen=True)
class Size:
    elements: int = 16_000_000  # of the values of all rows
    keys: int = 65_536
    dims: tuple[int, ...] = (16, 64, 128)
    turns: int = 15


def zeros(shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """In huge pages, as rows of a table are."""
    page = 2 << 20
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize + page)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.int8)
    begin = -whole.ctypes.data % page
    return whole[begin : begin + len(whole) - page].view(dtype).reshape(shape)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def measured(libraries: tuple[ctypes.CDLL, ctypes.CDLL], name: str, dim: int, size: Size) -> tuple[float, float]:
    """Nanoseconds a row by the program and by hand."""
    rows = size.elements // dim
    tables, by_hand = libraries
    tx, rates = TRANSFORMS[name]
    transform = rowwise(tx)
    layout, state = transform.layout(dim), tuple(jax.tree.leaves(transform.first_globals(dim)))
    update = lowered(kvjax.get_table(f"transforms{dim}", dim=dim).spec, transform, state, {})
    assert update is not None, name
    words, shared = np.asarray(update.run.program.words, np.int32), np.ascontiguousarray(update.run.shared)
    tables.make_table.restype = ctypes.c_void_p
    table = ctypes.c_void_p(tables.make_table(ctypes.c_int64(rows), ctypes.c_int64(dim), layout.text.encode()))
    stride = sum((int(slot.split("|")[2]) + 3) // 4 * 4 for slot in layout.text.split(";") if slot)
    rng = np.random.default_rng(0)

    def choose(ids: np.ndarray) -> None:
        tables.choose_rows(table, address(ids), ctypes.c_int64(len(ids)))

    def program(ids: np.ndarray, gradients: np.ndarray, step: int) -> None:
        count, number = ctypes.c_int64(len(words)), ctypes.c_int64(step)
        tables.run_program(table, address(words), count, address(shared), address(gradients), number)

    def rows_of_table() -> tuple[np.ndarray, np.ndarray]:
        values, slots = zeros((rows, dim), np.float32), zeros((rows, max(stride, 1)), np.int8)
        tables.read_rows(table, address(values), address(slots))
        return values, slots

    every = np.arange(rows, dtype=np.uint32)
    for ids in np.array_split(every, max(1, rows // size.keys)):  # all rows get slots
        choose(ids)
        program(ids, rng.standard_normal((len(ids), dim), np.float32), 1)
    (values, slots), headers = rows_of_table(), zeros((rows, 2), np.int64)
    hyper = np.asarray(rates, np.float32)

    def hand(ids: np.ndarray, gradients: np.ndarray, step: int) -> None:
        arrays = [a.ctypes.data for a in (values, slots, headers, ids, gradients)]
        by_hand.run_by_hand(
            name.encode(), ctypes.byref(Rows(*arrays, len(ids), stride, step)), address(hyper), ctypes.c_int64(dim)
        )

    calls: tuple[Callable[..., None], ...] = (program, hand)
    times: tuple[list[float], ...] = ([], [])
    for turn in range(size.turns):
        ids = rng.choice(rows, size.keys, replace=False).astype(np.uint32)
        gradients = rng.standard_normal((size.keys, dim), np.float32)
        choose(ids)
        for k in (0, 1) if turn % 2 else (1, 0):
            began = time.thread_time()
            calls[k](ids, gradients, turn + 2)
            times[k].append(time.thread_time() - began)
    same = np.isclose(rows_of_table()[0], values, rtol=1e-3, atol=1e-4)
    assert same.mean() > 1 - 1e-6, name  # where a sum rounds to the other side of 0, so does a sign
    tables.drop_table(table)
    ours, other = (1e9 / size.keys * float(np.median(t)) for t in times)
    return ours, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="+", choices=TRANSFORMS, default=list(TRANSFORMS))
    args = parser.parse_args()
    size = Size(elements=32_000, keys=256, dims=(16,), turns=2) if args.smoke else Size()
    grid = Table("transform", *(f"dim {dim}: program, by hand, ratio" for dim in size.dims), title="ns a row")
    with tempfile.TemporaryDirectory() as folder:
        libraries = built(Path(folder), "-O0" if args.smoke else "-O3")
        for name in args.only:
            cells = (measured(libraries, name, dim, size) for dim in size.dims)
            grid.add_row(name, *(f"{ours:.0f}, {other:.0f}, {ours / other:.2f}" for ours, other in cells))
    Console(width=110).print(grid)


if __name__ == "__main__":
    main()
