"""The command line: it parses a command's arguments, and runs the module of its name."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
import warnings
from collections.abc import Sequence

from kvjax._command.arguments import parser
from kvjax._command.errors import as_said, text_of, warning_as_said
from kvjax._command.streams import prepared


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its arguments; by default those of the process.

    Returns:
      The exit status: 0, 1 if what was looked at is not as it should be, 2 for an error, or 130 after Ctrl-C.
    """
    with prepared(), warnings.catch_warnings():
        args = parser().parse_args(argv)
        # Without the line of Python that was met, which is no user's.
        warnings.showwarning = lambda text, *_: print(f"warning: {warning_as_said(str(text), args)}", file=sys.stderr)
        return _run(args)


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
