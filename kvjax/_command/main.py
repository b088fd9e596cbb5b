"""Arguments: those of each command, and the module that runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import kvjax
from kvjax._command.errors import as_said, text_of
from kvjax._command.streams import prepared
from kvjax._formats.choices import FILE_FORMATS, MERGE_RULES, QUANTISED, SYSTEMS

_CHECKPOINT = (
    "a checkpoint's folder, a step of an Orbax CheckpointManager, or the manager's folder (then its last step)"
)
_EPILOG = (
    "Exit status: 0 if all is well, 1 if verify or releases found damage or loss, diff a difference, or get a key "
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
        description="Looks at checkpoints and releases of kvjax's tables.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=_EPILOG, allow_abbrev=False)
        if name != "completion":
            sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    inspect = command("inspect", "what the tables of a checkpoint are, and how much is in them")
    _path(inspect, "checkpoint", _CHECKPOINT)
    inspect.add_argument("--table", help="only this one")
    _base(inspect)
    inspect.add_argument("--stats", action="store_true", help="how frequencies, ages and norms of rows are distributed")
    _path(
        inspect,
        "--plot",
        "draw these distributions, and the growth over numbered checkpoints in a folder or a manager's steps (needs "
        "matplotlib)",
        "FILE",
    )

    top_rows = command("top", "the rows that stand out")
    _path(top_rows, "checkpoint", _CHECKPOINT)
    top_rows.add_argument("--table", help="its name; by default the only one")
    _base(top_rows)
    top_rows.add_argument("-n", type=_count, default=10, help="how many rows (default: 10)")
    top_rows.add_argument("--by", choices=("frequency", "recent", "oldest", "norm"), default="frequency")

    get = command("get", "the rows of some keys")
    _path(get, "checkpoint", _CHECKPOINT)
    get.add_argument("--table", help="its name; by default the only one")
    get.add_argument("keys", nargs="+", type=_key, metavar="KEY", help="an integer of 64 bits, as lookups take it")
    get.add_argument("--slots", action="store_true", help="the optimizer's slots, too")
    _base(get)

    verify = command(
        "verify", "whether every file of a checkpoint is as it was written, and what a delta builds on is there"
    )
    _path(verify, "checkpoint", _CHECKPOINT)
    _base(verify)
    verify.add_argument(
        "--alone", action="store_true", help="of a delta, do not look for what it builds on, which is elsewhere"
    )

    diff = command("diff", "what has come, gone and changed between two checkpoints")
    _path(diff, "first", _CHECKPOINT)
    _path(diff, "second", _CHECKPOINT)
    diff.add_argument("--table", action="append", help="compare only this one; may be said again")
    _base(diff)
    diff.add_argument("--examples", type=_count, default=5, help="keys of each kind to show (default: 5)")

    prune = command("prune", "a checkpoint without the rows that rules leave out")
    _path(prune, "checkpoint", _CHECKPOINT)
    prune.add_argument("out", nargs="?", help="folder of the new checkpoint; the old one stays as it is")
    _overwrite(prune)
    prune.add_argument("--table", action="append", help="prune only this one, and copy the others; may be said again")
    prune.add_argument("--dry-run", action="store_true", help="only say what each rule would leave out")
    _base(prune)
    _rules(prune)

    merge = command("merge", "one checkpoint of several, whose tables were trained apart")
    _path(merge, "checkpoint", _CHECKPOINT, nargs="+")
    _path(merge, "out", "folder of the new checkpoint; the others stay as they are")
    _overwrite(merge)
    merge.add_argument(
        "--rule", choices=MERGE_RULES, default="newest",
        help="what a key gets of which several have a row: the newest, or the mean, in which rows may weigh as much as "
        "their frequencies (default: newest)",
    )  # fmt: skip
    merge.add_argument(
        "--weight", action="append", type=float, default=[], metavar="W",
        help="how much the rows of a checkpoint weigh in the mean; say it for each, in their order (default: 1)",
    )  # fmt: skip
    merge.add_argument(
        "--ancestor", metavar="CHECKPOINT",
        help="the checkpoint from which all were trained on: only what each has changed since is merged",
    )  # fmt: skip
    _base(merge)

    convert = command("convert", "a table as a file of another program, or another system's as a checkpoint")
    _path(convert, "source", "a checkpoint, a file, or what --from says")
    _path(convert, "out", "the file, the prefix of DeepRec's files, or the folder of a new checkpoint")
    _overwrite(convert)
    convert.add_argument("--table", help="the table's, or the other system's variable's, name; by default the file's")
    convert.add_argument("--from", dest="kind", choices=(*FILE_FORMATS, *SYSTEMS, "kvjax"),
                         help="what the source is; by default what its name ends with, or a checkpoint")  # fmt: skip
    convert.add_argument(
        "--to", choices=(*FILE_FORMATS, "deeprec", "kvjax"), help="by default what the name ends with, or kvjax"
    )
    convert.add_argument("--slots", action="store_true", help="the optimizer's slots, too")
    convert.add_argument(
        "--slot",
        action="append",
        default=[],
        metavar="THEIRS=OURS",
        help="a slot of the other system's to take, and its name here; may be said again",
    )
    convert.add_argument(
        "--fill",
        action="append",
        default=[],
        metavar="SLOT=NUMBER",
        help="a slot that no file of the other system has, and what each row gets; may be said again",
    )
    convert.add_argument(
        "--score",
        action="append",
        default=[],
        choices=("freqs", "versions", "none"),
        help="what a score of dynamicemb's keys is; say it for each score, in their order",
    )
    convert.add_argument("--quantise", choices=QUANTISED, help="store rows in fewer bits")
    convert.add_argument("--partitions", type=_count, help="of DeepRec's variable (default: 1)")
    convert.add_argument("--dim", type=_count, help="of TFRA's or dynamicemb's variable")
    convert.add_argument("--key-dtype", help="of TFRA's or dynamicemb's variable (default: int64)")
    convert.add_argument("--dtype", help="of TFRA's values (default: float32), or of the table that is made of others")
    _base(convert)
    _rules(convert)

    releases = command("releases", "the releases of a model in a folder, and which of them servers read")
    _path(releases, "folder", "of kvjax.serving.Releases")
    change = releases.add_mutually_exclusive_group()
    change.add_argument(
        "--rollback",
        type=_count,
        metavar="NUMBER",
        help="make the tables and files of this release current again, and let no other take its place",
    )
    change.add_argument("--resume", action="store_true", help="let others take its place again")
    releases.add_argument("--verify", action="store_true", help="check every byte of every table")

    completion = command("completion", "a script that completes commands in a shell (needs shtab)")
    completion.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its arguments; by default those of the process.

    Returns:
      The exit status: 0, 1 if what was looked at is not as it should be, 2 for an error, or 130 after Ctrl-C.
    """
    with prepared():
        return _run(parser().parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    try:
        status: int = importlib.import_module(f"kvjax._command.{args.command}").run(args)
        sys.stdout.flush()  # or its error is said below
        return status
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(as_said(text_of(error, args.command), args), file=sys.stderr)
        return 2
    except Exception:  # a bug; Python's own status would be 1, a difference
        traceback.print_exc()
        return 2


def _rules(command: argparse.ArgumentParser) -> None:
    rules = command.add_argument_group("rows to keep")
    rules.add_argument("--min-frequency", type=_count, metavar="N", help="those that occurred at least so often")
    rules.add_argument("--max-age", type=_count, metavar="STEPS", help="those written within so many steps of the last")
    rules.add_argument("--min-norm", type=float, metavar="X", help="those whose Euclidean norm is at least this")
    rules.add_argument("--zero-rows", action="store_true", help="leave out rows of zeros")
    rules.add_argument("--top-k", type=_count, metavar="N", help="of those that are left, the N most frequent")


def _base(command: argparse.ArgumentParser) -> None:
    text = (
        "of a delta, where to look for what it builds on, beside the folders next to it: a checkpoint, or a folder of "
    )
    _path(command, "--base", text + "some; may be said again", "FOLDER", action="append")


def _overwrite(command: argparse.ArgumentParser) -> None:
    command.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")


def _path(command: argparse.ArgumentParser, name: str, text: str, metavar: str | None = None, **options: str) -> None:
    action = command.add_argument(name, help=text, metavar=metavar, **options)  # type: ignore[arg-type]
    # How shtab is told what completes this.
    action.complete = {  # type: ignore[attr-defined]
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


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"want a number from 0, got {text}")
    return int(text)
