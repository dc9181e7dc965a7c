"""Imports go down: each module imports only from its own layer and the layers below it.

Test modules mirror the modules of the package. New tensors do not follow torch's defaults.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "attnlib"

LAYERS = (
    ("errors", "env", "device", "compile", "object_path", "fields"),
    ("score_functions", "sparse"),
    ("kv_formats", "kv_dtype", "kv_rotation", "spec", "sizes", "capabilities"),
    ("ops",),
    ("cache", "workspace", "tuning"),
    ("metadata",),
    ("backends.step_plan", "backends.per_head_tensors"),
    ("backends.attention_impl", "backends.state_impl"),
    ("backends.state_backend",),
    ("backends.base", "backends.builtin", "backends.plugins", "backends._foreign"),
    ("backends.interface",),
    ("backends.loading", "backends._pairs", "backends._two_streams"),
    ("backends",),
    ("selection",),
    ("instrumentation",),
    ("layer",),
    ("mla",),
    ("sparse.indexer",),
    ("parallel",),
    ("compat",),
    (
        "integrations",
        "debug",
        "testing",
        "cli",
        "bench",
        "example_model",
        "ahead_of_time",
        "tuning.measure",
        "tuning.rank",
        "__main__",
        "__init__",
    ),
    ("key_selection", "indexer", "compressed_entries", "latent_attention"),  # former paths
    ("attention", "selector", "layers"),  # paths of other packages
)


def _layer(module: str) -> int:
    """Index of the layer of `module` (a dotted name below attnlib); the longest match wins."""
    matches = [
        (len(package), index)
        for index, packages in enumerate(LAYERS)
        for package in packages
        if module == package or module.startswith(f"{package}.")
    ]
    assert matches, f"attnlib.{module} is in no layer: add it to LAYERS and to docs/architecture.md"
    return max(matches)[1]


def _imports(tree: ast.AST) -> set[str]:
    """Modules below attnlib that a source imports; not those under TYPE_CHECKING."""
    type_checking_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        and isinstance(block.test, ast.Name)
        and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in type_checking_only:
            continue
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "attnlib"
        ):
            base = node.module.partition(".")[2]
            found |= {base} if base else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("attnlib.")
            }
    return found - {""}


def violations(name: str, source: str) -> list[str]:
    """Imports of module `name` (dotted, below attnlib) that the layers forbid."""
    found = []
    for target in sorted(_imports(ast.parse(source))):
        if target == "__version__":
            continue
        here, there = _layer(name), _layer(target)
        if there > here:
            found.append(f"{name} imports {target} (layer {here} -> {there})")
        importer, target_parts = name.split("."), target.split(".")
        if (
            importer[0] == target_parts[0] == "ops"
            and len(importer) > 2
            and len(target_parts) > 1
            and target_parts[1] in ("torch", "triton")
            and importer[1] != target_parts[1]
        ):
            found.append(f"{name} imports its counterpart {target}")
        siblings = (
            importer[0] == target_parts[0] == "backends"
            and here == there
            and importer[1] != "composite"
        )
        if siblings and importer[1] != target_parts[1]:
            found.append(f"{name} imports its sibling {target}")
    return found


def test_imports_go_down() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":  # attnlib/__init__.py imports public names lazily
            found += violations(name, path.read_text())
    assert not found


_FOR_OPS = (
    "ops", "errors", "env", "fields", "sizes", "kv_formats", "kv_dtype", "kv_rotation",
    "score_functions",
    "sparse.key_selection",
)  # fmt: skip


def test_ops_import_no_spec() -> None:
    for path in (PACKAGE / "ops").rglob("*.py"):
        assert not {
            m for m in _imports(ast.parse(path.read_text())) if not m.startswith(_FOR_OPS)
        }, path


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        (
            "backends.triton.impl",
            "from attnlib.selection import explain",
            "backends.triton.impl imports selection (layer 12 -> 13)",
        ),
        (
            "cache.table",
            "def f():\n    import attnlib.metadata.common",
            "cache.table imports metadata.common (layer 4 -> 5)",
        ),
        (
            "backends.torch.impl",
            "from attnlib.backends.triton.impl import X",
            "backends.torch.impl imports its sibling backends.triton.impl",
        ),
        (
            "ops.triton.slots",
            "from attnlib.ops.torch.slots import x",
            "ops.triton.slots imports its counterpart ops.torch.slots",
        ),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str, message: str) -> None:
    assert violations(name, source) == [message]


def test_type_checking_imports_do_not_count() -> None:
    assert (
        violations(
            "spec",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from attnlib.layer import Attention",
        )
        == []
    )


TESTS = Path(__file__).parent
OUTSIDE = ("benchmarks", "examples", "gpu", "hosts", "properties")
"""Folders of tests of scripts and examples, and of tests that need a GPU, vLLM or random draws."""
SEVERAL_MODULES = """
    backends/fla/test_backend.py backends/flash_mla/test_backend.py
    backends/flashinfer/test_backend.py
    backends/test_adapter_conformance.py backends/test_device_values.py backends/test_refusals.py
    backends/test_signatures.py
    cache/test_state_machines.py cli/test_random_calls.py compat/seeds/test_programs.py
    compat/seeds/test_rows.py integrations/transformers/test_gpu.py
    integrations/transformers/test_hybrid_model.py integrations/transformers/test_indices.py
    integrations/transformers/test_sweep.py ops/test_counterparts.py ops/torch/test_no_sync.py
    ops/triton/hopper/test_compile.py ops/triton/test_compile.py ops/triton/test_growing_caches.py
    ops/triton/test_latent.py ops/triton/test_random_batches.py ops/triton/test_sass.py
    test_architecture.py test_ci.py test_compatibility_page.py test_docs.py test_hardening.py
    test_import_cycles.py test_imported_names.py test_init.py test_light_import.py
    test_packaging.py test_structure.py test_tiny.py testing/test_docs.py testing/test_examples.py
    testing/test_fuzz.py testing/test_golden_v1.py
""".split()
"""Tests of one property of several modules, of the whole package, or of its documentation."""


def test_test_modules_mirror_the_package() -> None:
    """`tests/a/test_b.py` and `tests/a/test_b_subject.py` test a module `b` below `attnlib/a`."""
    others = []
    for path in sorted(TESTS.rglob("test_*.py")):
        relative = path.relative_to(TESTS)
        if relative.parts[0] in OUTSIDE:
            continue
        below = (PACKAGE / relative.parent).rglob("*")
        names = {each.stem for each in below if each.suffix in (".py", ".c") or each.is_dir()}
        parts = path.stem.removeprefix("test_").split("_")
        if not names & {"_".join(parts[: end + 1]) for end in range(len(parts))}:
            others.append(relative.as_posix())
    assert sorted(others) == sorted(SEVERAL_MODULES), (
        "name a test module after the module that it tests; SEVERAL_MODULES lists the exceptions"
    )


FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
FLOATING = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
"""Those whose result has the default dtype, whatever their arguments are."""
COMMANDS = ("ahead_of_time", "bench", "cli", "kernels", "testing", "tuning")
"""Their processes have the defaults of torch."""


def _unstated(source: str) -> Iterator[tuple[int, str]]:
    """Line and argument of calls that leave device or dtype of a new tensor to torch's default."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        if name not in FACTORIES or not isinstance(owner, ast.Name) or owner.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        if not given & {"out", None}:  # None: `**options`
            yield from ((node.lineno, x) for x in ("device",) if x not in given)
            yield from ((node.lineno, x) for x in ("dtype",) if name in FLOATING and x not in given)


def test_new_tensors_state_their_device_and_dtype() -> None:
    """`device=None` says that the default device is meant."""
    assert list(_unstated("torch.zeros(3)\ntorch.tensor([1], device=x)")) == [
        (1, "device"), (1, "dtype"),
    ]  # fmt: skip
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {argument}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not set(path.relative_to(PACKAGE).parts) & set(COMMANDS)
        for line, argument in _unstated(path.read_text())
    ]
    assert not found
