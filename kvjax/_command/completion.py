"""``kvjax completion``: a script that completes commands, by shtab."""

from __future__ import annotations

import argparse

from kvjax._command.arguments import parser
from kvjax._formats.errors import needed


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    shtab = needed("shtab", "kvjax completion", "cli")
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(
            f"kvjax completion: want one of {list(shtab.SUPPORTED_SHELLS)}, which this shtab knows, got {args.shell}; "
            "pip install -U shtab"
        )
    print(shtab.complete(parser(), shell=args.shell))
    return 0
