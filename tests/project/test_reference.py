"""The reference lists every public name by the first sentence of its docstring; running this file writes it."""

import importlib
import inspect
import re
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference.md"
# The public modules, each with its guides.
MODULES = {
    "kvjax": "tables.md sharding.md serving.md#programs",
    "kvjax.admit": "tables.md#which-keys-get-a-row-and-which-rows-stay",
    "kvjax.evict": "tables.md#which-keys-get-a-row-and-which-rows-stay",
    "kvjax.initializers": "tables.md#the-rows",
    "kvjax.constraints": "tables.md#the-rows",
    "kvjax.storage": "tables.md#tables-larger-than-memory cuda.md",
    "kvjax.flax": "../README.md#the-training-loop recipes.md",
    "kvjax.flax.nnx": "../README.md#the-training-loop recipes.md",
    "kvjax.optax": "optimizers.md laziness.md",
    "kvjax.orbax": "checkpoints.md restarts.md",
    "kvjax.checkpoint": "checkpoints.md deltas.md",
    "kvjax.convert": "exports.md migration.md",
    "kvjax.serving": "serving.md frozen-format.md",
}
HEAD = """# Reference

Every public name, with the first sentence of its docstring. The linked file, or `help(name)`, has the rest: shapes,
dtypes, errors and an example. `python tests/project/test_reference.py` writes this page.
"""
# Members without an underscore that only other modules of kvjax call.
INTERNAL = {
    "alternatives", "array", "async_save", "at", "calls_python", "cells", "check", "checked", "chosen", "close",
    "counts_kept", "donated", "finalize", "first_globals", "fitting_key_dtype", "follows", "forgets", "formula",
    "given", "init", "judged", "layout", "leaf", "limits_age", "needs_number", "of", "of_columns", "own_options",
    "passing", "read", "reads_rows", "reasons", "snapshot", "stored", "tests", "text", "tree_flatten",
    "tree_flatten_with_keys", "tree_unflatten", "version", "warn", "with_words",
}  # fmt: skip


def first_sentence(doc):
    paragraph = " ".join((doc or "").split("\n\n")[0].split())
    sentence = re.match(r"(.*?[^.]\.)(?: [A-Z`(]|$)", paragraph)
    return (sentence[1] if sentence else paragraph).replace("``", "`").replace("|", "\\|")


def members(cls):
    """The names of methods and properties that kvjax defines in the class, or in a private base of it, with docs."""
    found = {}
    for base in cls.__mro__:
        if base is cls or base.__name__ not in PUBLIC:
            found = {name: doc for name, x in vars(base).items() if name[0] != "_" and (doc := doc_of(x))} | found
    return sorted(found.items())


def doc_of(member):
    """The docstring of a method or property of kvjax's."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    is_ours = inspect.isfunction(function) and function.__module__.startswith("kvjax")
    return inspect.getdoc(function) if is_ours else None


PUBLIC = {name for module in MODULES for name in dir(importlib.import_module(module))}


def lines_of(module):
    guides = ", ".join(f"[{guide.split('/')[-1].split('#')[0]}]({guide})" for guide in MODULES[module.__name__].split())
    yield from ("", f"## {module.__name__}", "", first_sentence(module.__doc__), "", f"See {guides}.", "")
    yield from ("| | |", "|---|---|")
    for name in sorted(dir(module), key=str.lower):
        x = getattr(module, name)
        if not inspect.ismodule(x) and not name.endswith("State"):
            yield from lines_on(name, x)
    if states := [f"`{name}`" for name in dir(module) if name.endswith("State")]:
        yield from ("", "The states of transforms, for annotations:", *(f"{state}," for state in states[:-1]))
        yield f"{states[-1]}."


def lines_on(name, x):
    if isinstance(x, types.UnionType):  # which has no docstring: the string behind its definition is that
        (path,) = [p for p in (ROOT / "kvjax").rglob("*.py") if f"\n{name}: TypeAlias" in p.read_text()]
        doc = re.search(rf'\n{name}: TypeAlias.*?\n"""(.*?)"""', path.read_text(), re.S)[1]
    else:
        path, doc = Path(inspect.getsourcefile(x)), inspect.getdoc(x)
    yield f"| [**`{name}`**](../{path.relative_to(ROOT).as_posix()}) | {first_sentence(doc)} |"
    if inspect.isclass(x) and not issubclass(x, Exception):
        yield from (f"| `.{member}{called(x, member)}` | {first_sentence(said)} |" for member, said in members(x)
                    if member not in INTERNAL and said)  # fmt: skip


def called(cls, member):
    """How a method is told from a property."""
    return "" if isinstance(inspect.getattr_static(cls, member), property) else "()"


def page():
    return HEAD + "\n".join(each for name in MODULES for each in lines_of(importlib.import_module(name))) + "\n"


def test_the_reference_is_written():
    assert PAGE.read_text() == page(), "python tests/project/test_reference.py"


def test_what_is_internal_is_there():
    objects = [getattr(importlib.import_module(module), name) for module in MODULES
               for name in dir(importlib.import_module(module))]  # fmt: skip
    there = {member for x in objects if inspect.isclass(x) for base in x.__mro__ for member in vars(base)}
    assert there >= INTERNAL


if __name__ == "__main__":
    PAGE.write_text(page())
