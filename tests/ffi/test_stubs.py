"""The stubs of the native modules are what nanobind generates; `python tests/ffi/test_stubs.py` writes them."""

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kvjax/ffi"
NATIVE = "A native module: the calls on whole tables of one backend, its handlers and constants."
MODULES = ("_cpu", "_cuda", "_emulated")


def generated(name):
    """The stub of a module that is built; skips if it is not."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    module = pytest.importorskip(f"kvjax.ffi.{name}", exc_type=ImportError)
    stubs = stubgen.StubGen(module)
    stubs.put(module)
    text = re.sub(r"^OPERATIONS: .*$", "OPERATIONS: dict[str, dict[str, bool]]", stubs.get(), flags=re.M)
    text = re.sub(r"^INSTRUCTIONS: .*$", "INSTRUCTIONS: list[tuple[str, int, bool]]", text, flags=re.M)
    text = re.sub(r"^FUSED: .*$", "FUSED: dict[str, tuple[str, str]]", text, flags=re.M)
    return re.sub(r"^HOME: int = .*$", "HOME: int", text, flags=re.M)  # which is another one on a GPU


def names(text):
    """The public statements of a stub by what they define, formatting aside."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = inspect.cleandoc(node.value)
    return {
        getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None): ast.dump(node)
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
    }


def protocol(text):
    """What every module has, as a type: the stub `_native.pyi`, from that of the CPU's module."""
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    members = [node for node in tree.body if isinstance(node, ast.AnnAssign | ast.FunctionDef)]
    for node in members:
        if isinstance(node, ast.FunctionDef):
            node.args.args.insert(0, ast.arg("self"))
    native = ast.parse(f'class Native(Protocol):\n    """{NATIVE}"""').body[0]
    native.body += members
    return ast.unparse(ast.Module([*imports, *ast.parse("from typing import Protocol").body, *classes, native], []))


@pytest.mark.parametrize("name", MODULES)
def test_stub_is_that_of_the_module(name):
    made = names(generated(name))
    text = (FOLDER / f"{name}.pyi").read_text()
    written = names(text) | (names((FOLDER / "_cpu.pyi").read_text()) if "from kvjax.ffi._cpu import" in text else {})
    assert made == written, "run python tests/ffi/test_stubs.py"


def test_protocol_is_that_of_the_stubs():
    made = names(protocol((FOLDER / "_cpu.pyi").read_text()))
    assert made == names((FOLDER / "_native.pyi").read_text()), "run python tests/ffi/test_stubs.py"


def test_operations_are_exported():
    from kvjax.ffi import _cpu

    assert all(name.islower() and set(about) >= {"writes", "makes_rows"} for name, about in _cpu.OPERATIONS.items())
    assert {name for name, about in _cpu.OPERATIONS.items() if about["evicts"]} == {"evict", "restrict"}


if __name__ == "__main__":
    importlib.import_module("kvjax")
    (FOLDER / "_cpu.pyi").write_text(generated("_cpu"))
    (FOLDER / "_native.pyi").write_text(protocol(generated("_cpu")))
    subprocess.run(["ruff", "check", "-q", "--select", "I", "--fix", FOLDER / "_native.pyi"], check=True)
    subprocess.run(["ruff", "format", FOLDER / "_cpu.pyi", FOLDER / "_native.pyi"], check=True)
