"""Arguments of each command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax._formats.choices import EXPORTED, IMPORTED, MERGE_RULES, QUANTISED

if TYPE_CHECKING:
    import numpy as np

_CHECKPOINT = (
    "a checkpoint's folder, a step of an Orbax CheckpointManager, or the manager's folder (then its last step)"
)
_EPILOG = (
    "Exit status: 0 if all is well, 1 if verify or releases finds damage or loss, diff a difference, or get a key "
    "without a row, 2 for an error, 130 after Ctrl-C."
)


class _Command(argparse.ArgumentParser):
    """The arguments of one command, which says its own usage beside an argument that it does not know."""

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        found, unknown = super().parse_known_args(*args, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(
        prog="kvjax",
        description="Inspects and converts checkpoints of kvjax tables, and manages releases.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)
    for name, (text, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=_EPILOG, allow_abbrev=False)
        if name != "completion":
            command.add_argument("--json", action="store_true", help="print JSON")
        add_arguments(command)
    return top


def _inspect(command: argparse.ArgumentParser) -> None:
    _path(command, "checkpoint", _CHECKPOINT)
    command.add_argument("--table", help="show only this table")
    _base(command)
    command.add_argument(
        "--stats", action="store_true", help="add the distributions of frequencies, ages and norms of rows"
    )
    _path(
        command,
        "--plot",
        "plot these distributions, and the growth over numbered checkpoints in a folder or a manager's steps (needs "
        "matplotlib)",
        "FILE",
    )
    _overwrite(command, "file of --plot")


def _top(command: argparse.ArgumentParser) -> None:
    _path(command, "checkpoint", _CHECKPOINT)
    command.add_argument("--table", help="name of the table; by default the only one")
    _base(command)
    command.add_argument("-n", type=_count, default=10, help="number of rows (default: 10)")
    command.add_argument("--by", choices=("frequency", "recent", "oldest", "norm"), default="frequency")


def _get(command: argparse.ArgumentParser) -> None:
    _path(command, "checkpoint", _CHECKPOINT)
    command.add_argument("--table", help="name of the table; by default the only one")
    command.add_argument("keys", nargs="+", type=_key, metavar="KEY", help="a 64-bit integer, as in lookups")
    command.add_argument("--slots", action="store_true", help="include the optimizer's slots")
    _base(command)


def _verify(command: argparse.ArgumentParser) -> None:
    _path(command, "checkpoint", _CHECKPOINT)
    _base(command)
    command.add_argument(
        "--alone", action="store_true", help="for a delta, do not look for the checkpoints that it builds on"
    )


def _diff(command: argparse.ArgumentParser) -> None:
    _path(command, "first", _CHECKPOINT)
    _path(command, "second", _CHECKPOINT)
    command.add_argument("--table", action="append", help="compare only this table; may be repeated")
    _base(command)
    command.add_argument("--examples", type=_count, default=5, help="number of keys of each kind to show (default: 5)")


def _prune(command: argparse.ArgumentParser) -> None:
    _path(command, "checkpoint", _CHECKPOINT)
    command.add_argument("out", nargs="?", help="folder of the new checkpoint; the old one stays as it is")
    _overwrite(command)
    command.add_argument("--table", action="append", help="prune only this table, and copy the others; may be repeated")
    command.add_argument("--dry-run", action="store_true", help="only show what each rule would leave out")
    _base(command)
    _rules(command)


def _merge(command: argparse.ArgumentParser) -> None:
    _path(command, "checkpoint", _CHECKPOINT, nargs="+")
    _path(command, "out", "folder of the new checkpoint; the others stay as they are")
    _overwrite(command)
    command.add_argument(
        "--rule", choices=MERGE_RULES, default="newest",
        help="which row a key gets if several checkpoints have one: the newest, the mean, or the mean weighted by "
        "frequency (default: newest)",
    )  # fmt: skip
    command.add_argument(
        "--weight", action="append", type=float, default=[], metavar="W",
        help="weight of a checkpoint's rows in the mean; give one for each, in their order (default: 1)",
    )  # fmt: skip
    command.add_argument(
        "--ancestor", metavar="CHECKPOINT",
        help="the checkpoint from which all of them started: only what each has changed since is merged",
    )  # fmt: skip
    _base(command)


def _convert(command: argparse.ArgumentParser) -> None:
    _path(command, "source", "a checkpoint, a file, or what --from names")
    _path(command, "out", "the file, the prefix of DeepRec's files, or the folder of a new checkpoint")
    _overwrite(command, "file or checkpoint")
    command.add_argument(
        "--table", help="name of the table, or of the other system's variable; by default the file's name"
    )
    command.add_argument("--from", dest="kind", choices=(*IMPORTED, "kvjax"),
                         help="kind of source; by default taken from the file extension, or a checkpoint")  # fmt: skip
    command.add_argument(
        "--to", choices=(*EXPORTED, "kvjax"), help="kind of output; by default taken from the file extension, or kvjax"
    )
    command.add_argument("--slots", action="store_true", help="include the optimizer's slots")
    command.add_argument(
        "--slot",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="a slot of the other system to import, and its name in kvjax; may be repeated",
    )
    command.add_argument(
        "--fill",
        action="append",
        default=[],
        metavar="SLOT=NUMBER",
        help="a slot that no file of the other system has, and its value in each row; may be repeated",
    )
    command.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="what a column of a file is called there (keys= to number the rows); may be repeated",
    )
    command.add_argument(
        "--score",
        action="append",
        default=[],
        choices=("freqs", "versions", "none"),
        help="the meaning of a score of dynamicemb's keys; give one for each score, in their order",
    )
    command.add_argument("--quantise", choices=QUANTISED, help="store rows in fewer bits")
    command.add_argument("--partitions", type=_positive, help="number of partitions of DeepRec's variable (default: 1)")
    command.add_argument("--dim", type=_positive, help="dim of TFRA's or dynamicemb's variable")
    command.add_argument("--key-dtype", help="key dtype of TFRA's or dynamicemb's variable (default: int64)")
    command.add_argument("--dtype", help="dtype of the table's rows (default: that of the source)")
    command.add_argument("--source-dtype", help="dtype of TFRA's values (default: that of --dtype, or float32)")
    _base(command)
    _rules(command)


def _releases(command: argparse.ArgumentParser) -> None:
    _path(command, "folder", "the folder of kvjax.serving.Releases")
    change = command.add_mutually_exclusive_group()
    change.add_argument(
        "--rollback",
        type=_count,
        metavar="NUMBER",
        help="make the tables and files of this release current again, and pause: no other replaces it",
    )
    change.add_argument("--resume", action="store_true", help="end the pause: other releases may become current again")
    command.add_argument("--verify", action="store_true", help="check every byte of every table")


def _completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": ("show the tables of a checkpoint and their sizes", _inspect),
    "top": ("show the rows with the highest frequency, or as --by says", _top),
    "get": ("show the rows of some keys", _get),
    "verify": (
        "check that every file of a checkpoint is as it was written, and that what a delta builds on is there",
        _verify,
    ),
    "diff": ("show which rows were added, removed and changed between two checkpoints", _diff),
    "prune": ("write a copy of a checkpoint without the rows that rules leave out", _prune),
    "merge": ("merge several checkpoints, whose tables were trained separately, into one", _merge),
    "convert": ("write a table as a file for another program, or another system's table as a checkpoint", _convert),
    "releases": ("list the releases of a model in a folder, and show which one servers read", _releases),
    "completion": ("print a script for command completion in a shell (needs shtab)", _completion),
}


def _rules(command: argparse.ArgumentParser) -> None:
    rules = command.add_argument_group("rows to keep")
    rules.add_argument("--min-frequency", type=_count, metavar="N", help="rows whose keys occurred at least N times")
    rules.add_argument(
        "--max-age", type=_count, metavar="STEPS", help="rows written within this many steps of the last step"
    )
    rules.add_argument("--min-norm", type=float, metavar="X", help="rows whose Euclidean norm is at least X")
    rules.add_argument("--zero-rows", action="store_true", help="leave out rows of zeros")
    rules.add_argument("--top-k", type=_count, metavar="N", help="of the remaining rows, the N most frequent")
    _path(
        rules, "--remove",
        "leave out all that is known of the keys in this file, which has an integer on each line: rows, and counts of "
        "keys that wait for one", "FILE", type=_keys_in,
    )  # fmt: skip


def _base(command: argparse.ArgumentParser) -> None:
    text = (
        "for a delta, where to look for the checkpoints that it builds on, besides the folders next to it: a "
        "checkpoint, or a folder of checkpoints"
    )
    _path(command, "--base", text + "; may be repeated", "FOLDER", action="append")


def _overwrite(command: argparse.ArgumentParser, what: str = "checkpoint") -> None:
    command.add_argument("--overwrite", action="store_true", help=f"replace an existing {what}")


def _path(command: Any, name: str, text: str, metavar: str | None = None, **options: Any) -> None:
    """An argument of a parser, or of a group of one, that is a path."""
    action = command.add_argument(name, help=text, metavar=metavar, **options)
    # How shtab is told what completes this.
    action.complete = {
        "bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))",
        "tcsh": "f",
    }  # fmt: skip


def _key(text: str) -> int:
    try:
        key = int(text)
    except ValueError:
        key = 2**64
    if not -(2**63) <= key < 2**64:
        mend = "kvjax.hash_keys makes keys of strings"
        raise argparse.ArgumentTypeError(f"want an integer of at most 64 bits, got {text}; {mend}")
    return key


def _keys_in(path: str) -> np.ndarray:
    """The keys of a file, ``(m,)`` uint64."""
    import numpy as np

    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")  # in any locale, and as Windows writes it
    except (OSError, UnicodeDecodeError) as error:
        got = f"{error.strerror}: {path}" if isinstance(error, OSError) else f"{path}, which is no text of UTF-8"
        raise argparse.ArgumentTypeError(f"want a text file with a key on each line, got {got}") from error
    found: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            found += [_key(line) % 2**64] if line.strip() else []
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{path}, line {number}: {error}") from error
    return np.array(found, np.uint64)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"want a number from 1, got {text}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"want a number from 0, got {text}")
    return int(text)
