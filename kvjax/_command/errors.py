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
    if isinstance(error, MemoryError) and not str(error).startswith("kvjax"):  # of Python or NumPy
        return f"want memory, got none ({str(error) or 'MemoryError'}); free memory, or raise the limit of this process"
    return str(error)


def as_said(text: str, args: argparse.Namespace) -> str:
    """An error of a function, with the flags of the command for its arguments."""
    flags = {"overwrite=True": "--overwrite", 'dtype="float32"': "--dtype float32", "format=": "--to"}
    flags["columns="] = "--column"
    same = ("base", "quantise", "dim", "table", "dtype", "key_dtype", "source_dtype")
    flags |= {f"{name}=": "--" + name.replace("_", "-") for name in same}
    for argument, flag in flags.items():
        if hasattr(args, flag.split()[0].removeprefix("--").replace("-", "_")):
            text = re.sub(rf"\b{re.escape(argument)}", flag, text)
    if args.command == "convert":  # which calls several functions
        text = re.sub(r"^kvjax: (table '.*?', )?(compact|export|import|save):", r"kvjax: \1convert:", text)
    return text if text.startswith("kvjax") else f"kvjax: {args.command}: {text}"  # of the system, say


def warning_as_said(text: str, args: argparse.Namespace) -> str:
    """The same of a warning; one of another library's as it is."""
    return as_said(text, args) if text.startswith("kvjax") else text
