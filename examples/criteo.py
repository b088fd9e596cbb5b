"""Click logs in the Criteo format: read them a few thousand rows at a time, write them, make one up.

One impression a line, tab separated, no header: the label (absent in test files), 13 integers `I1..I13` and
26 categories `C1..C26` of up to 8 hexadecimal digits. Any field but the label may be empty, any file gzipped.

    log = criteo.File("train.txt.gz")
    for rows in log.batches(0, len(log), 4096):
        rows.label, rows.dense, rows.cats
"""

import dataclasses
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np

DENSE, CATS = 13, 26
# No integer of a log is as small as this, and no category is negative: a category has 32 bits.
NO_INTEGER = np.iinfo(np.int64).min
NO_CATEGORY = -1

_DIGIT = np.full(256, 255, np.uint8)  # the value of a digit's character, in any base up to 16
for _value, _digit in enumerate("0123456789abcdef"):
    _DIGIT[[ord(_digit), ord(_digit.upper())]] = _value


class FormatError(ValueError):
    """A file that is no log in this format."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Lines of a log: `label` `(n,)` float32 or None, `dense` `(n, 13)` int64, `cats` `(n, 26)` int64."""

    label: np.ndarray | None
    dense: np.ndarray
    cats: np.ndarray

    def __len__(self) -> int:
        return len(self.cats)

    def __getitem__(self, part: slice) -> "Rows":
        return Rows(None if self.label is None else self.label[part], self.dense[part], self.cats[part])

    def batches(self, start: int, stop: int, size: int) -> Iterator["Rows"]:
        """Rows `start` to `stop`, `size` at a time; the last batch may be shorter."""
        for at in range(start, stop, size):
            yield self[at : min(at + size, stop)]


class File:
    """A log on disk. Blocks of it are read and parsed as they are asked for; the whole is never in memory."""

    def __init__(self, path: str | Path, block: int = 1 << 22):
        self.path, self.block = Path(path), block
        self._rows: int | None = None

    def __len__(self) -> int:
        if self._rows is None:  # costs a pass over the file, but one without parsing
            self._rows = sum(block.count(b"\n") for block in self._blocks())
        return self._rows

    def batches(self, start: int, stop: int, size: int) -> Iterator[Rows]:
        """Rows `start` to `stop`, `size` at a time; the last batch may be shorter."""
        held: Rows | None = None  # parsed and not handed out yet: fewer than `size` rows
        at = 0
        for block in self._blocks():
            count = block.count(b"\n")
            if at + count > start:
                rows = self._parse(block, at)[max(start - at, 0) : stop - at]
                held = rows if held is None else _concatenate(held, rows)
                whole = len(held) - len(held) % size
                yield from held.batches(0, whole, size)
                held = held[whole:]
            at += count
            if at >= stop:
                break
        if held is not None and len(held):
            yield held

    def _parse(self, block: bytes, at: int) -> Rows:
        try:
            return parse(block, at + 1)
        except ValueError as error:
            raise FormatError(f"{self.path}: {error}; {__doc__.splitlines()[2]}") from None

    def _blocks(self) -> Iterator[bytes]:
        """The file in pieces of whole lines, about `block` bytes each; a missing last newline is supplied."""
        with self._opened() as file:
            rest = b""
            while piece := self._read(file):
                lines, newline, rest = (rest + piece).rpartition(b"\n")
                if newline:
                    yield lines + newline
            if rest:
                yield rest + b"\n"

    def _opened(self) -> IO[bytes]:
        try:
            return _open(self.path, "rb")
        except OSError as error:
            raise FormatError(f"{self.path}: want a log in the Criteo format, got: {error.strerror}") from None

    def _read(self, file: IO[bytes]) -> bytes:
        try:
            return file.read(self.block)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FormatError(f"{self.path}: want a gzipped file, as its name says, got: {error}") from None


def parse(block: bytes, first_line: int = 1) -> Rows:
    """Whole lines, each ended by a newline, to Rows. All fields at once: three times faster than a loop."""
    text = np.frombuffer(block.replace(b"\r\n", b"\n"), np.uint8)
    ends = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
    starts = np.concatenate([[0], ends[:-1] + 1])
    widths = np.diff(np.flatnonzero(text[ends] == ord("\n")), prepend=-1)
    unlabelled = bool(widths[0] == DENSE + CATS)
    width = DENSE + CATS if unlabelled else 1 + DENSE + CATS
    if np.any(widths != width):
        line = int(np.argmax(widths != width))
        raise ValueError(f"line {first_line + line}: want {width} tab separated fields, got {widths[line]}")
    fields = np.stack([starts, ends]).reshape(2, -1, width)
    label = None
    if not unlabelled:
        value, empty = _numbers(text, fields[..., :1], 10, 1, first_line)
        wrong = empty | (value < 0) | (value > 1)
        if wrong.any():
            raise ValueError(f"line {first_line + int(np.argmax(wrong))}: the label is 0 or 1")
        label = value[:, 0].astype(np.float32)
    dense, no_integer = _numbers(text, fields[..., -DENSE - CATS : -CATS], 10, 18, first_line)
    cats, no_category = _numbers(text, fields[..., -CATS:], 16, 8, first_line)
    return Rows(label, np.where(no_integer, NO_INTEGER, dense), np.where(no_category, NO_CATEGORY, cats))


def write(path: str | Path, rows: Rows) -> None:
    """Write `rows` as a file that `File` reads back equal; gzipped if the name ends in `.gz`."""
    with _open(Path(path), "wb") as file:
        for i in range(len(rows)):
            fields = [] if rows.label is None else [str(int(rows.label[i]))]
            fields += ["" if x == NO_INTEGER else str(x) for x in rows.dense[i].tolist()]
            fields += ["" if x == NO_CATEGORY else f"{x:08x}" for x in rows.cats[i].tolist()]
            file.write("\t".join(fields).encode() + b"\n")


def log_dense(dense: np.ndarray) -> np.ndarray:
    """`(n, 13)` int64 to float32: `sign(x) * log(1 + |x|)`, as counts spread over decades; 0 if missing."""
    x = np.where(dense == NO_INTEGER, 0, dense).astype(np.float64)
    return (np.sign(x) * np.log1p(np.abs(x))).astype(np.float32)


def planted(count: int, seed: int) -> tuple[Rows, np.ndarray]:
    """A log in which the click probability of every row is known: `count` rows and their `(count,)` logits.

    Columns hold from 10 to 50,000 categories at a time, Zipf distributed. Every category has an effect of its
    own, a larger one in the columns of few. Two pairs of columns interact, the integers act through their
    logarithm, and any field may be missing.
    """
    rng = np.random.default_rng(seed)
    now = np.arange(count) / count
    dense, cats = np.empty((count, DENSE), np.int64), np.empty((count, CATS), np.int64)
    logit = np.full(count, -1.3)
    factors = []
    for c, size in enumerate(np.geomspace(10, 50_000, CATS).astype(int)):
        rank = np.arange(size)
        mass = np.cumsum((rank + 1.0) ** -1.2)
        place = np.searchsorted(mass / mass[-1], rng.random(count))
        # Half of the places, fewer among the most popular, change hands at some moment: there is always news.
        change = np.where(rng.random(size) < 0.5 * rank / (rank + 20), rng.random(size), np.inf)
        category = np.where(now > change[place], place + size, place)
        category[rng.random(count) < rng.uniform(0, 0.2)] = 2 * size  # missing, with an effect like any other
        code = np.append(rng.choice(2**32, 2 * size, replace=False), NO_CATEGORY)
        cats[:, c] = code[category]
        logit += rng.normal(0, 0.8 * (10 / size) ** 0.25, 2 * size + 1)[category]
        factors.append(rng.normal(0, 0.6, 2 * size + 1)[category])
    logit += factors[2] * factors[5] + factors[3] * factors[4]
    for c in range(DENSE):
        dense[:, c] = np.exp(rng.normal(rng.uniform(0, 5), 1.0, count)).astype(np.int64) - (c == 1)
        dense[rng.random(count) < rng.uniform(0, 0.3), c] = NO_INTEGER
        x = log_dense(dense[:, c])
        logit += rng.normal(0, 0.15) * (x - x.mean())
    label = rng.random(count) < 1 / (1 + np.exp(-logit))
    return Rows(label.astype(np.float32), dense, cats), logit


def _open(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, mode)) if path.suffix == ".gz" else path.open(mode)


def _numbers(
    text: np.ndarray, fields: np.ndarray, base: int, most_digits: int, first_line: int
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers in `text[start:end]` for `fields` `(2, n, columns)`: their values, and which are empty."""
    starts, ends = fields
    minus = (text[starts] == ord("-")) & (base == 10)
    first = starts + minus
    digits = ends - first
    value = np.zeros(starts.shape, np.int64)
    bad = (digits > most_digits) | (minus & (digits == 0))
    for k in range(min(int(digits.max(initial=0)), most_digits)):
        inside = k < digits
        # A field that has ended looks at its own separator, which `inside` then ignores.
        digit = _DIGIT[text[np.minimum(first + k, ends)]]
        bad |= inside & (digit >= base)
        value = np.where(inside, value * base + digit, value)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        field = text[starts[row, column] : ends[row, column]].tobytes().decode(errors="replace")
        kind = f"an integer of at most {most_digits} digits" if base == 10 else f"{most_digits} hexadecimal digits"
        raise ValueError(f"line {first_line + row}: want {kind}, got {field!r}")
    return np.where(minus, -value, value), starts == ends


def _concatenate(a: Rows, b: Rows) -> Rows:
    label = None if a.label is None or b.label is None else np.concatenate([a.label, b.label])
    return Rows(label, np.concatenate([a.dense, b.dense]), np.concatenate([a.cats, b.cats]))
