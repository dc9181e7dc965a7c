"""Kernels compiled without a GPU are those that a server on a GPU needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib.ahead_of_time import DescribedLayer, DescribedServer, described_layers, needed_kernels
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.layer.warmup import WarmupReport
from attnlib.score_functions.builtin import alibi_sqrt
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits
from tests.described_batches import KINDS as BATCH_KINDS
from tests.described_kinds import KINDS, LAYOUT_KINDS
from tests.fresh_process import run_module

LIMITS = BatchLimits(max_num_reqs=2, max_num_tokens=16, max_seq_len=64)
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)

pytest.importorskip("triton")


def described(device: str) -> DescribedServer:
    return DescribedServer(resolve_device(device), LIMITS)


@pytest.mark.slow
def test_a_server_with_the_folder_compiles_nothing(tmp_path: Path) -> None:
    """Compile for an H100 into a folder, move it, serve random batches in another process.

    Triton's own look-up decides (`described_server`). Launches with another specialization compile
    there, so the count can fail.
    """
    from tests.described_server import ARGUMENTS

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "build")
    written, shipped = tmp_path / "written", tmp_path / "shipped"
    command = ["compile", "--device", "H100", *ARGUMENTS, "--out", str(written), "--processes", "1"]
    done = run_module("attnlib", command, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not (tmp_path / "build").exists()  # everything is in the folder
    written.rename(shipped)
    (entry,) = json.loads((shipped / "attnlib-kernels.json").read_text())["entries"]
    names = [name for name, _ in entry["kernels"]]
    assert {"hopper_prefill_kernel", "decode_kernel"} <= set(names)

    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "server"), "ATTNLIB_KERNELS": str(shipped)}
    environment |= {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    # A new interpreter, whose sets have another order.
    command = [sys.executable, "-m", "tests.described_server"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    served = json.loads(done.stdout.splitlines()[-1])
    assert served["random batches"]["compiled"] == []
    assert sorted(served["random batches"]["found"]) == sorted(names)
    assert served["unaligned"] == {"found": [], "compiled": ["decode_kernel", "write_kv_kernel"]}
    assert "ATTNLIB_KERNELS" not in done.stderr


@pytest.mark.slow
def test_every_kind_of_layer_has_kernels() -> None:
    """Layouts of the cache select no kernels; GPUs of other kinds share none; the noted steps of
    warm-ups need all kernels, and rows that they leave out need none of their own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_module("tests.described_kinds", [], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    on_hopper = found["H100"]
    assert found["noted"] == found["all forms"] == on_hopper
    assert len(found["table"]["sm_80"]) >= 4
    assert set(on_hopper) == set(KINDS) and all(len(keys) >= 2 for keys in on_hopper.values())
    assert len({tuple(on_hopper[kind]) for kind in LAYOUT_KINDS}) == 1
    for kind, keys in found["sm_80"].items():
        assert len(keys) >= 4 and not set(keys) & set(on_hopper[kind])


@pytest.mark.slow
def test_random_batches_need_no_further_kernel() -> None:
    """Verification steps over latents, divided and undivided prefills, captured batches."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_module("tests.described_batches", [], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(BATCH_KINDS)
    for kind, kernels in found.items():
        assert kernels["lacking"] == [], kind
        # Of undivided and of divided prefills, whose splits `combine_kernel` combines.
        prefills = [name for name in kernels["used"] if re.search("prefill|latent_decode", name)]
        divides = "window" not in kind  # of 128 keys
        assert len(prefills) >= 1 + divides and ("combine_kernel" in kernels["used"]) == divides
    # One and several blocks of query rows of a request, and those of prefills that fill the chip.
    assert found["16 latent heads"]["used"].count("hopper_latent_decode_kernel") == 3


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_a_process_that_interprets_triton_compiles_nothing() -> None:
    with pytest.raises(BackendUnavailableError, match="unset TRITON_INTERPRET"):
        needed_kernels(described("H100"), [DescribedLayer(SPEC)])


def test_layers_that_cannot_be_compiled_are_refused() -> None:
    with pytest.raises(ContractError, match="score function cannot be compiled without"):
        needed_kernels(
            described("H100"), [DescribedLayer(SPEC.replace(score_function=alibi_sqrt()))]
        )
    with pytest.raises(UnsupportedConfigError, match="batch_invariant"):
        changes = {"batch_invariant": True, "kv_cache_dtype": "nvfp4"}
        needed_kernels(described("H100"), [DescribedLayer(SPEC.replace(**changes))])


@pytest.mark.parametrize("device", ["cpu", "gfx942", "sm_75", "cuda:7"])
def test_gpus_whose_shared_memory_is_not_known(device: str) -> None:
    with pytest.raises(ContractError, match="shared memory is known: use one of sm_80"):
        described(device).chip()


def test_numbers_of_gpus_by_name() -> None:
    counts = {
        "H100": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114, "H20": 78,
        "NVIDIA A100-SXM4-80GB": 108, "sm_90": 132, "sm_80": 108,
    }  # fmt: skip
    for device, count in counts.items():
        chip = described(device).chip()
        assert chip.num_sms == count, device
    assert chip.shared_memory == 163 * 1024 and chip.capability == (8, 0) and not chip.has_fp8
    with pytest.raises(ContractError, match="give --num-sms"):
        described("B300").chip()
    assert DescribedServer(resolve_device("B300"), LIMITS, 148).chip().num_sms == 148


def test_the_report_of_a_warmup_counts_kernels() -> None:
    assert str(WarmupReport(((1,),), 2.0, 3, 4)).endswith("in 2.0 s: 3 kernels found, 4 compiled")
    assert str(WarmupReport(((1,),), 2.0)) == "warmed up with 1 batches in 2.0 s"


def test_expanded_prefills_have_the_sizes_of_the_kind_with_heads() -> None:
    heads = SPEC.replace(num_kv_heads=4, head_size=192, head_size_v=128)
    latents = SPEC.replace(num_kv_heads=1, head_size=576, head_size_v=512, use_mla=True)
    found = described_layers({"full": heads, "full over latents": latents, "alone": latents})
    assert found["full over latents"] == DescribedLayer(latents, (128, 128))
    assert found["full"].expanded is None and found["alone"].expanded is None
