"""The shape of the project: imports run one way, the public names are these, files stay small."""

import ast
import re
import subprocess
from pathlib import Path

import kvjax

ROOT = Path(__file__).parents[1]

# A module may import from its own layer and those before it; adapters (the last) never from each other.
LAYERS = [
    ["kvjax.ffi"],
    ["kvjax._numbers", "kvjax._varying", "kvjax._mix"],
    [
        "kvjax._keys",
        "kvjax._generated",
        "kvjax._initializers",
        "kvjax._storage",
        "kvjax._export",
        "kvjax._rounding",
        "kvjax._constraints",
        "kvjax._placement",
    ],
    ["kvjax._admit", "kvjax._evict"],
    ["kvjax._spec"],
    ["kvjax._masks", "kvjax._processes", "kvjax._spread", "kvjax._live", "kvjax._device"],
    ["kvjax._shards"],
    ["kvjax._ops", "kvjax._options", "kvjax._steps"],
    ["kvjax._initial_rows", "kvjax._stats", "kvjax._bag_ops"],
    ["kvjax._exchange", "kvjax._room"],
    ["kvjax._sparse", "kvjax._pooling"],
    ["kvjax._copies"],
    ["kvjax._calls"],
    ["kvjax._deliver", "kvjax._ahead"],
    ["kvjax._rowwise"],
    ["kvjax._handle"],
    ["kvjax._move"],
    ["kvjax._reading"],
    ["kvjax._writing"],
    ["kvjax._table"],
    ["kvjax._gradients", "kvjax._registry", "kvjax._reshard", "kvjax._bags", "kvjax._features", "kvjax._prefetch"],
    ["kvjax.flax", "kvjax.optax", "kvjax.orbax"],
]
# The folders of kvjax/ffi that the files of each folder may include; a module is put together from all of them.
CPP_FOLDERS = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "device": {"core", "device"},
    "cuda": {"core", "device", "cuda"},
    "threads": {"device", "threads"},
    "handlers": {"core", "handlers"},
    "python": {"core", "handlers", "python"},
}
MODULES = {
    "cpu/module.cc": {"core", "cpu", "handlers", "python"},
    "threads/module.cc": {"core", "device", "threads", "handlers", "python"},
    "cuda/module.cc": {"core", "device", "cuda", "handlers", "python"},
    "cuda/module.cu": {"core", "device", "cuda", "handlers"},
    "cuda/module.h": {"core", "device", "cuda", "handlers"},
}
# The files that know XLA beside the handlers: those that name what a handler of their backend runs on.
XLA = {"cpu/thread_pool.h", *MODULES}


def layer_of(module):
    return next(i for i, layer in enumerate(LAYERS) for name in layer if (module + ".").startswith(name + "."))


def imports(tree):
    """Names that a module imports from kvjax, those only for type checking left out."""
    guarded = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "kvjax":
            yield from (f"kvjax.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_python_imports_run_one_way():
    seen = 0
    for path in sorted((ROOT / "kvjax").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module == "kvjax":
            continue
        mine = layer_of(module)
        for name in imports(ast.parse(path.read_text())):
            if name.startswith("kvjax."):
                seen += 1
                assert layer_of(name) <= mine, f"{module} imports {name}"
                if mine == len(LAYERS) - 1 and layer_of(name) == mine:
                    assert name.split(".")[1] == module.split(".")[1], f"adapter {module} imports {name}"
    assert seen > 20


def test_cpp_includes_run_one_way():
    seen = 0
    root = ROOT / "kvjax/ffi"
    for path in root.rglob("*"):
        if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        name = str(path.relative_to(root))
        folder = name.split("/")[0]
        for include in re.findall(r'#include [<"]([^">]+)', path.read_text()):
            if include.startswith("kvjax/ffi/"):
                seen += 1
                assert include.split("/")[2] in MODULES.get(name, CPP_FOLDERS[folder]), f"{name} includes {include}"
            if include.startswith("xla/"):
                assert folder == "handlers" or name in XLA, f"{name}: the handlers alone know XLA"
            if include.startswith("nanobind"):
                assert folder == "python" or name in MODULES, f"{name}: the bindings alone know nanobind"
            if include.startswith(("cuda", "cub")):
                assert folder == "cuda" or name == "device/atomic.h", f"{name}: cuda/ alone knows CUDA"
    assert seen > 20


def test_python_knows_no_platform():
    for path in (ROOT / "kvjax").rglob("*.py"):
        if path != ROOT / "kvjax/ffi/__init__.py":
            assert not re.search(r"default_backend\(|platform ==|[\"'](gpu|cuda|CUDA)[\"']", path.read_text()), path


def test_public_names():
    assert set(kvjax.__all__) == {
        "Ahead", "Exported", "Keys", "Prune", "SparseRows", "Stats", "Table", "admit", "backends", "constraints",
        "drop_table", "evict", "flax", "get_table", "grad", "hash_keys", "initializers", "keys", "lookup_bag",
        "lookup_many", "merge", "optax", "orbax", "prefetch", "reshard", "stats", "storage", "tables", "value_and_grad",
    }  # fmt: skip
    assert set(kvjax.flax.__all__) == {"Embed", "EmbedBag", "nnx"}
    assert set(kvjax.optax.__all__) == {"PartitionState", "Rowwise", "global_norm", "joint", "partition", "rowwise"}
    assert set(kvjax.orbax.__all__) == {"TableHandler", "TableRestore", "TableSave", "combine", "split"}
    for package in (kvjax, kvjax.flax, kvjax.optax, kvjax.orbax):
        assert all(getattr(package, name).__doc__ for name in package.__all__)


def test_files_stay_small():
    one_class = {"kvjax/ffi/cpu/table.h": 450}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    paths = [ROOT / name for name in tracked] or sorted((ROOT / "kvjax").rglob("*"))
    for path in paths:
        name = str(path.relative_to(ROOT))
        if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh") and path.exists():
            lines = len(path.read_text().splitlines())
            assert lines <= one_class.get(name, 400), f"{name} has {lines} lines: is it one idea?"


def test_public_docstrings_name_every_argument():
    for path in (ROOT / "kvjax").rglob("*.py"):
        tree = ast.parse(path.read_text())
        scopes = [tree] + [n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
        for scope in scopes:
            for node in scope.body:
                if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                    continue
                doc = ast.get_docstring(node) or ""
                if "Args:" not in doc:
                    continue
                args = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
                for arg in args:
                    assert re.search(rf"^\s+\*{{0,2}}{arg}(, \w+)*:", doc, re.M), f"{path.name}:{node.name}: {arg}"
