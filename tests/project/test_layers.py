"""The shape of the project: imports run one way, the public names are these, files stay small."""

import ast
import functools
import graphlib
import inspect
import re
import subprocess
from pathlib import Path

import kvjax

ROOT = Path(__file__).parents[2]

# A package may import from those in the layers before it; adapters (the last) never from each other. Inside a package
# modules import in no circle. What of checkpoints stands before `kvjax._ops` needs no table, and no JAX.
LAYERS = [
    ["kvjax._formats"],
    ["kvjax.ffi", "kvjax._values", "kvjax._spmd"],
    ["kvjax._process"],
    ["kvjax._keys", "kvjax.admit", "kvjax.constraints", "kvjax.evict", "kvjax.initializers", "kvjax.storage"],
    ["kvjax._spec", "kvjax._programs"],
    ["kvjax.checkpoint._disk"],
    ["kvjax.checkpoint._chains"],
    ["kvjax.checkpoint"],
    ["kvjax._ops"],
    ["kvjax._sharded"],
    ["kvjax._training"],
    ["kvjax._table"],
    ["kvjax._lookup", "kvjax.checkpoint._tables"],
    ["kvjax._export", "kvjax.convert"],
    ["kvjax._public"],
    ["kvjax.flax", "kvjax.optax", "kvjax.orbax", "kvjax.serving"],
    ["kvjax._command"],
    ["kvjax.__main__"],
]
# The folders of kvjax/ffi that the files of each folder may include; a module is put together from all of them.
CPP_FOLDERS = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "device": {"core", "device"},
    "cuda": {"core", "device", "cuda"},
    "threads": {"core", "device", "threads"},
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
XLA = {"cpu/backend_bags.h", *MODULES}


def package(module):
    """The package of a module: the innermost that has a layer."""
    return max((name for layer in LAYERS for name in layer if (module + ".").startswith(name + ".")), key=len)


def layer_of(module):
    return next(i for i, layer in enumerate(LAYERS) if package(module) in layer)


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
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def modules():
    """Each module of kvjax with the modules that it imports."""
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "kvjax").rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {}
    for name, path in names.items():
        found = set(imports(ast.parse(path.read_text())))
        graph[name] = {n for n in found if n in names and n not in ("kvjax", name)}
    return graph


def test_packages_import_from_the_layers_before_them():
    graph = modules()
    assert len(graph) > 40
    for module, found in graph.items():
        for name in found if module != "kvjax" else ():
            same = package(name) == package(module)
            assert same or layer_of(name) < layer_of(module), f"{module} imports {name}"


def test_no_modules_import_in_a_circle():
    tuple(graphlib.TopologicalSorter(modules()).static_order())


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


def test_nothing_waits_for_a_whole_device():
    """Nor uses the stream that waits for all others: see kvjax/ffi/device/order.h."""
    waits = r"cudaDeviceSynchronize|cudaStreamLegacy|cuda(Memcpy|Memset|Malloc|DeviceReset|HostUnregister)\("
    for path in (ROOT / "kvjax/ffi").rglob("*"):
        if path.suffix in (".h", ".cc", ".cu", ".cuh"):
            assert not re.search(waits, path.read_text()), path


def test_words_for_the_host_are_the_devices():
    """Written by the device alone, for the whole system: both sides can change a word only by atomics over the bus."""
    root = ROOT / "kvjax/ffi"
    body = (root / "device/atomic.h").read_text().split("void StoreForHost(")[1].split("\n}")[0]
    assert "cuda::thread_scope_system" in body and "thread_scope_device" not in body
    words = re.search(r"struct Report \{(.*?)\n\};", (root / "device/control.h").read_text(), re.S)[1]
    names = re.findall(r"(\w+)[;,]", re.sub("//.*", "", words))
    assert {"begun", "write", "version", "refusals", "want"} <= set(names)
    # The host writes one, before any call knows its table: the version that it begins with.
    begins = ("whole.h", "report_->version = first_version")
    seen = []
    for path in (root / "device").glob("*.h"):
        text = path.read_text()
        word = rf"\breport_?(?:->|\.)(?:{'|'.join(names)})\b"
        for found in re.findall(rf"{word} *(?:[-+|&]?=(?!=)|\+\+|--)[^;]*|(?:\+\+|--){word}", text):
            assert (path.name, found) == begins, f"{path.name}: {found}"
            seen.append(found)
        for stored in re.findall(r"\bStore\((?:\w+(?:->|\.))*report_?(?:->|\.)\w+", text):
            raise AssertionError(f"{path.name}: {stored} is for the host")
    assert len(seen) == 1


def test_errors_of_cpp_have_one_home():
    for path in (ROOT / "kvjax/ffi").rglob("*"):
        if path.suffix in (".h", ".cc", ".cu", ".cuh") and path.name not in ("error.h", "error_texts.h"):
            assert not re.search(r"MakeError|ErrorCode::k\w+, ", path.read_text()), path


# What raises without saying whose error it is, for another function to say it: by file, or by the class that is raised.
INNER = {"_process.py", "bundle.py", "function_initializer.py", "slot_layout.py", "rules.py", "generators.py"}
INNER_ERRORS = {
    "ArgumentTypeError", "AttributeError", "Damaged", "FrozenInstanceError", "Missing", "NeedsFunctionError",
    "NotLowered",
}  # fmt: skip
INNER_FUNCTIONS = {"resolve", "_of_segment", "_pool"}


def test_errors_say_that_they_are_of_kvjax():
    seen = 0
    for path in (ROOT / "kvjax").rglob("*.py"):
        tree = ast.parse(path.read_text())
        inner = {id(n) for f in ast.walk(tree) if getattr(f, "name", "") in INNER_FUNCTIONS for n in ast.walk(f)}
        for node in ast.walk(tree):
            if path.name in INNER or id(node) in inner or not isinstance(node, ast.Raise):
                continue
            match node.exc:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[text, *_]) if (
                    name[0].isupper() and name not in INNER_ERRORS
                ):
                    first = text.values[0] if isinstance(text, ast.JoinedStr) else text
                    # What begins with the name of a function that was called wrongly is Python's form.
                    ok = not isinstance(first, ast.Constant) or str(first.value).startswith("kvjax")
                    assert ok, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(text)}"
                    seen += 1
    assert seen > 40


def test_python_knows_no_platform():
    for path in (ROOT / "kvjax").rglob("*.py"):
        if path != ROOT / "kvjax/ffi/__init__.py":
            assert not re.search(r"default_backend\(|platform ==|[\"'](gpu|cuda|CUDA)[\"']", path.read_text()), path


def test_public_names():
    assert set(kvjax.__all__) == {
        "Exported", "Feature", "Keys", "KeysLike", "Prefetched", "Program", "ProgramError", "Prune", "PruneReport",
        "PrunedRows", "QuantisationReport", "Simulated", "SparseRows", "Stats", "Table", "admit", "backends",
        "checkpoint", "commit", "constraints", "convert", "drop_table", "evict", "export", "flax", "get_table", "grad",
        "hash_keys", "initializers", "keys", "lookup_bag", "lookup_many", "merge", "optax", "orbax", "prefetch",
        "reshard", "serving", "simulate", "stats", "storage", "tables", "value_and_grad",
    }  # fmt: skip
    assert set(kvjax.flax.__all__) == {"Embed", "EmbedBag", "nnx"}
    assert set(kvjax.optax.__all__) == {
        "AccumulateState", "AdagradDecayState", "ApplyIfFiniteState", "ApplyIfState", "CatchUp", "CatchUpRows",
        "CatchUpState", "CommitState", "Compatibility", "CountReport", "EmaRowsState", "FadingSquares", "FtrlState",
        "GapAdamRows", "GapAdamState", "GroupAdamState", "LeafReport", "LossScaleState", "PartitionState", "RowFacts",
        "RowNoiseState", "Rowwise", "RowwiseAdagradState", "SegmentsState", "Words", "accumulate", "adagrad_decay",
        "add_row_noise", "apply_if", "apply_if_finite", "averaged", "catch_up", "caught_up", "check_compatibility",
        "ema_rows", "ftrl", "gap_adam", "global_norm", "group_adam", "group_lasso", "joint", "mean_of_duplicates",
        "partition", "rename_tables", "rowwise", "rowwise_adagrad", "scale_by_cowclip", "scale_by_frequency",
        "scale_loss", "schedule_free_eval_params", "segments", "sparse_group_ftrl", "sweep",
    }  # fmt: skip
    assert set(kvjax.orbax.__all__) == {
        "StatefulTables", "TableHandler", "TableRestore", "TableSave", "combine", "split",
    }  # fmt: skip
    assert set(kvjax.convert.__all__) == {
        "ExportReport", "FileError", "ImportReport", "Imported", "export_checkpoint", "from_deeprec", "from_dense",
        "from_dynamicemb", "from_npz", "from_parquet", "from_safetensors", "from_sok", "from_tfplus", "from_tfra",
        "import_checkpoint",
    }  # fmt: skip
    assert set(kvjax.checkpoint.__all__) == {
        "BaseReport", "CheckpointError", "Diff", "FileReport", "MergeReport", "TableDelta", "TableDiff", "Verified",
        "changes", "compact", "diff", "merge", "prune", "restore", "rows", "save", "verify",
    }  # fmt: skip
    assert set(kvjax.serving.__all__) == {
        "Changes", "FrozenError", "FrozenTable", "PausedError", "Release", "ReleaseInfo", "Releases",
    }  # fmt: skip
    assert dir(kvjax.serving) == sorted([*kvjax.serving.__all__, "FrozenArrays"])  # which needs JAX
    for package in (kvjax, kvjax.checkpoint, kvjax.convert, kvjax.flax, kvjax.optax, kvjax.orbax, kvjax.serving):
        assert all(getattr(package, name).__doc__ for name in dir(package))
    choices = [kvjax.admit, kvjax.constraints, kvjax.evict, kvjax.initializers, kvjax.storage, kvjax.checkpoint]
    for module in (kvjax, kvjax.convert, kvjax.flax, kvjax.flax.nnx, kvjax.optax, kvjax.orbax, *choices):
        assert dir(module) == sorted(module.__all__), module


def lines_of_docstrings(text):
    """How many lines of a Python file are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, owners)]
    docs = [body[0] for body in bodies if body and isinstance(body[0], ast.Expr)]
    return sum(
        doc.end_lineno - doc.lineno + 1
        for doc in docs
        if isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    )


def test_files_stay_small():
    """In lines of code and comments: what a docstring says in full makes no file too large."""
    one_idea = {
        "kvjax/ffi/cpu/table.h": 450,
        "tests/cpp/device/failure_test.cc": 420,
        "kvjax/ffi/core/error_texts.h": 500,
        "examples/frozen_table.h": 550,  # one file to copy
    }
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    paths = [ROOT / name for name in tracked] or sorted((ROOT / "kvjax").rglob("*"))
    for path in paths:
        name = str(path.relative_to(ROOT))
        if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh") and path.exists():
            text = path.read_text()
            lines, most = len(text.splitlines()), one_idea.get(name, 400)
            if lines > most and path.suffix == ".py":
                lines -= lines_of_docstrings(text)
            assert lines <= most, f"{name} has {lines} lines without docstrings: is it one idea?"


def test_public_docstrings_name_every_argument():
    seen = 0
    modules = [kvjax, kvjax.checkpoint, kvjax.convert, kvjax.flax, kvjax.flax.nnx, kvjax.optax, kvjax.orbax]
    for module in [*modules, kvjax.serving]:
        public = [getattr(module, name) for name in dir(module)]
        methods = [m for c in public if isinstance(c, type) for n, m in vars(c).items() if not n.startswith("_")]
        inherited = (*kvjax.Table.__mro__, *kvjax.serving.FrozenTable.__mro__)
        methods += [m for c in inherited for n, m in vars(c).items() if not n.startswith("_")]
        own = [f for f in public + methods if inspect.isfunction(f) and f.__module__.startswith("kvjax")]
        for function in own:
            doc = function.__doc__ or ""
            for arg in [a for a in inspect.signature(function).parameters if a != "self"]:
                seen += 1
                found = re.search(rf"^\s+\*{{0,2}}{arg}(, \w+)*:", doc, re.M)
                assert found or "Args:" not in doc, f"{function.__qualname__}: {arg}"
    assert seen > 100


# What JAX, Flax and Orbax call, what a handle keeps, and what stands for options that have their own types elsewhere.
UNTYPED = {
    "own_options", "given", "kept", "tape", "tree_flatten", "tree_flatten_with_keys", "tree_unflatten", "__init__",
    "at", "replace", "of",
}  # fmt: skip


def test_public_signatures_say_their_types():
    """A tree is a PyTree, which type checkers cannot say more of; anything else has a type that is not Any."""
    modules = [kvjax, kvjax.admit, kvjax.evict, kvjax.initializers, kvjax.storage, kvjax.constraints]
    modules += [kvjax.checkpoint, kvjax.convert, kvjax.optax, kvjax.orbax, kvjax.flax, kvjax.serving]
    public = [getattr(module, name) for module in modules for name in dir(module)]
    public += [kvjax.flax.nnx.grad, kvjax.flax.nnx.value_and_grad]
    classes = {
        base for c in public if isinstance(c, type) for base in c.__mro__ if base.__module__.startswith("kvjax.")
    }
    methods = [
        getattr(m, "__func__", m) for c in classes for n, m in vars(c).items() if n[0] != "_" and n not in UNTYPED
    ]
    methods = [m.fget if isinstance(m, property) else m for m in methods]
    functions = {f for f in public + methods if inspect.isfunction(f) and f.__module__.startswith("kvjax.")}
    assert len(functions) > 120
    for function in functions:
        signature = inspect.signature(function)
        for kind in (*(p.annotation for p in signature.parameters.values()), signature.return_annotation):
            assert not re.search(r"\bAny\b", str(kind)), f"{function.__qualname__}: {kind}"
    for cls in classes:
        for field, kind in inspect.get_annotations(cls).items():
            assert field in UNTYPED or not re.search(r"\bAny\b", str(kind)), f"{cls.__qualname__}.{field}: {kind}"
