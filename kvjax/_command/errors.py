"""Errors of a command: the texts of functions, in the words of the command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import re

from kvjax._formats.atomic import saying


def text_of(error: Exception, command: str) -> str:
    """What an error says; of one of the system with a sentence of ours, and without the number."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        if not str(error.strerror).startswith("kvjax: "):  # what is written says more
            with contextlib.suppress(OSError), saying(command, reads=True):
                raise error
        return f"{error.strerror}: {os.fspath(error.filename)}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:  # of who has installed kvjax without the rest
        package = error.name.split(".")[0]
        return f"want {package}, got no such module; pip install {package}"
    if isinstance(error, MemoryError) and not str(error).startswith("kvjax"):  # of Python or NumPy
        return f"want memory, got none ({str(error) or 'MemoryError'}); free memory, or raise the limit of this process"
    return str(error)


_OTHERS = {"format": "to", "columns": "column", "slots": "slot", "scores": "score"}
"""Arguments of functions whose options have other names."""


def as_said(text: str, args: argparse.Namespace) -> str:
    """An error of a function, with the options of the command for its arguments."""

    def option(said: re.Match[str]) -> str:
        argument, value = said.groups(default="")
        name = next((name for name in (_OTHERS.get(argument), argument) if name and hasattr(args, name)), None)
        if name is None:
            return said[0]
        return "--" + name.replace("_", "-") + ("" if value in ("", "True") else " " + value.strip("\"'"))

    # Paths may have such words, as "table=user/part.parquet" does: none in a path, nor in what was given, is meant.
    texts = [str(x) for value in vars(args).values() for x in (value if isinstance(value, list) else [value])]
    given = "".join(f"{re.escape(x)}|" for x in texts if "=" in x)
    text = re.sub(given + r"""(?<![\w/.-])([a-z_]+)=(True|\d+|"\w+"|'\w+')?""", option, text)
    if args.command == "convert":  # which calls several functions
        text = re.sub(r"^kvjax: (table '.*?', )?(compact|export|import|save):", r"kvjax: \1convert:", text)
    return text if text.startswith("kvjax") else f"kvjax: {args.command}: {text}"  # of the system, say


def warning_as_said(text: str, args: argparse.Namespace) -> str:
    """The same of a warning; one of another library's as it is."""
    return as_said(text, args) if text.startswith("kvjax") else text
