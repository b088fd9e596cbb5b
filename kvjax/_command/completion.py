"""``kvjax completion``: a script that completes commands, by shtab."""

from __future__ import annotations

import argparse

from kvjax._command.main import parser
from kvjax._formats.errors import needed


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    print(needed("shtab", "kvjax completion", "cli").complete(parser(), shell=args.shell))
    return 0
