"""Arguments of the examples: numbers of something, files to write, and .npz files of some arrays of integers."""

import argparse
import zipfile
import zlib
from pathlib import Path

import numpy as np


def natural(text: str) -> int:
    """A number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"want a number from 0, got {text}")
    return int(text)


def positive(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want a number from 1, got {text}")
    return int(text)


def share(text: str) -> float:
    """A share of something, from 0 to below 1."""
    try:
        if 0 <= float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"want a number from 0 to below 1, got {text}")


def writable(text: str) -> Path:
    """A file to write, in a folder that is there: it is written when the work is done."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"want a file in a folder that is there, got {text}")
    return path


def parsed(parser: argparse.ArgumentParser, **smoke: float) -> argparse.Namespace:
    """The arguments of the command line; with --smoke, these in the place of other defaults."""
    if parser.parse_args().smoke:
        parser.set_defaults(**smoke)
    return parser.parse_args()


def arrays_of(path: Path, *names: str) -> dict[str, np.ndarray]:
    """These arrays of integers of a file; ends the program with a sentence if it is another."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in names}
    except (
        OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        got = str(error).partition(" If you trust")[0]  # NumPy goes on with how to load what nobody should
        raise SystemExit(f"{path}: want an .npz file with {', '.join(names)}, got: {got}") from None
    for name, array in arrays.items():
        if array.dtype.kind not in "iu":  # of others, a cast to 64 bits would make ids that are none
            raise SystemExit(f"{path}: want integers as {name}, got {array.dtype}")
    return arrays
