"""Importing attnlib and selecting a backend is light; measured in new processes."""

import ast

import pytest

from tests.fresh_process import run_program

HEAVY = ("triton", "transformers", "flash_attn", "flashinfer", "vllm", "hypothesis", "pytest")

PROBE = """
import sys, torch
before = set(sys.modules)
{statement}
import torch
heavy = sorted({{name.split('.')[0] for name in set(sys.modules) - before}} & set({heavy!r}))
print(heavy, torch.cuda.is_initialized())
"""


def _loads(statement: str) -> str:
    program = PROBE.format(statement=statement, heavy=HEAVY)
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_and_selection_load_no_heavy_package_and_do_not_initialize_cuda() -> None:
    """H2: selection on a CPU imports declarations only."""
    spec = "attnlib.AttentionSpec(num_heads=4, head_size=64, dtype=torch.float32)"
    statement = (
        "import attnlib.backends, attnlib.metadata\n"
        f"import attnlib; attnlib.get_attn_backend({spec}, device='cpu')\n"
        f"attnlib.explain({spec}, device='cpu')"
    )
    assert _loads(statement) == "[] False"


WITHOUT_TRITON = (
    "hopper.support",
    "heuristics.hopper_tiles",
    "heuristics.splits",
    "heuristics.tile_entries",
    "heuristics.tile_table",
    "heuristics.choose_tiles",
    "heuristics.tiles",
    "hopper",
)


@pytest.mark.slow
def test_modules_of_ops_triton_that_need_no_triton() -> None:
    """Selection, `attnlib tune` and `attnlib doctor` use these on machines without triton."""
    statement = (
        f"import importlib\nfor name in {WITHOUT_TRITON}:\n"
        "    importlib.import_module(f'attnlib.ops.triton.{name}')\n"
        "    assert 'triton' not in sys.modules, name"
    )
    assert _loads(statement) == "[] False"


@pytest.mark.slow
def test_the_probe_reports_triton() -> None:
    pytest.importorskip("triton")
    assert _loads("import attnlib.ops.triton.hopper.dispatch") == "['triton'] False"


EXPLAIN_FUNCTION = """
import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.device import resolve_device
spec = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
assert "Hopper kernel" in TritonBackend.explain_lines(spec, resolve_device("sm_90"))[0]
assert "triton" in str(attnlib.explain(spec, device="sm_90"))
"""

EXPLAIN_COMMAND = """
import contextlib, io
from attnlib.cli import main
arguments = "explain --device sm_90 --num-heads 8 --num-kv-heads 2 --head-size 128"
with contextlib.redirect_stdout(io.StringIO()) as shown:
    main(arguments.split())
assert "triton" in shown.getvalue()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [EXPLAIN_FUNCTION, EXPLAIN_COMMAND], ids=["function", "command"]
)
def test_explain_for_hopper_imports_no_kernels(program: str) -> None:
    """H2: the kernels follow from the spec and the compute capability."""
    assert _loads(program) == "[] False"


@pytest.mark.slow
def test_the_probe_reports_a_heavy_import() -> None:
    assert _loads("import hypothesis") == "['hypothesis'] False"


COUNTER = """
import sys, torch
calls = 0
def count(frame, event, function):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
{statement}
sys.setprofile(None)
print(calls)
"""


def _calls(statement: str) -> int:
    """Functions that a statement calls, in Python and in C."""
    return int(run_program(COUNTER.format(statement=statement)).stdout)


def test_import_takes_little_time_besides_torch() -> None:
    """It calls 1700 functions; the import of layers shows that the count sees more than that."""
    assert _calls("import attnlib") < 5000 < _calls("import attnlib.layer")


def test_an_excluded_backend_is_never_imported() -> None:
    """I6: `-name` prevents the import of the declaration, too. The declarations of
    FlashInfer's three backends are in one package."""
    names = "-flash_attn,-flashinfer,-flashinfer_mla,-flashinfer_gdn"
    statement = (
        "import os\n"
        f"os.environ['ATTNLIB_BACKEND'] = '{names}'\n"
        "import attnlib\n"
        "spec = attnlib.AttentionSpec(num_heads=4, head_size=64, dtype=torch.float32)\n"
        "attnlib.get_attn_backend(spec, device='cpu')\n"
        "excluded = ('attnlib.backends.flash_attn', 'attnlib.backends.flashinfer')\n"
        "assert not [m for m in sys.modules if m.startswith(excluded)]"
    )
    assert _loads(statement) == "[] False"


OF_FEW_LAYERS = (
    "fused_step", "invariant_decode", "latent_decode", "page_write", "rotary_write", "score",
    "selected", "selected_latents", "shared_decode", "state_step", "streams", "warp_decode",
)  # fmt: skip
"""Modules of kernels."""

PLAIN_SERVER = """
import attnlib
from attnlib.ahead_of_time import DescribedLayer, DescribedServer, needed_kernels
from attnlib.device import resolve_device
spec = attnlib.AttentionSpec(
    num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, block_size=16
)
limits = attnlib.BatchLimits(max_num_reqs=2, max_num_tokens=32, max_seq_len=64)
server = DescribedServer(resolve_device("H200"), limits)
kernels = {kernel.name for kernel in needed_kernels(server, [DescribedLayer(spec)])}
assert {"hopper_prefill_kernel", "decode_kernel"} <= kernels
"""


@pytest.mark.slow
def test_a_server_of_plain_layers_imports_no_kernels_of_others() -> None:
    """Triton reads the source of every device function of a module, a third of the start."""
    pytest.importorskip("triton")
    program = (
        "import os, sys, torch\nos.environ.pop('TRITON_INTERPRET', None)\n" + PLAIN_SERVER +
        "print(sorted(name.rpartition('.')[2] for name in sys.modules if '.kernels.' in name))"
    )  # fmt: skip
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert {"prefill", "decode", "cache_write"} <= loaded
    assert not loaded & set(OF_FEW_LAYERS)
