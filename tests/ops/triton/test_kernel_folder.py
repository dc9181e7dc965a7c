"""Folders of compiled kernels: their manifest, and Triton's cache over a folder that was moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.cache import get_cache_manager  # noqa: E402

from attnlib.errors import ContractError  # noqa: E402
from attnlib.ops.triton.launch.described import NeededKernel  # noqa: E402
from attnlib.ops.triton.launch.kernel_folder import (  # noqa: E402
    add_to_cache,
    cache_at,
    is_stored,
)
from attnlib.ops.triton.launch.keys import folder_name, key_facts  # noqa: E402
from attnlib.ops.triton.launch.manifest import MANIFEST, Entry, Manifest  # noqa: E402

KERNELS = [NeededKernel("first_kernel", "ab" * 32), NeededKernel("second_kernel", "01" * 32)]
TARGET = GPUTarget("cuda", 90, 32)


def stored(folder: Path) -> None:
    """Both kernels and a module in C, as Triton stores them."""
    with cache_at(folder):
        for name, key in KERNELS:
            manager = get_cache_manager(key)
            files = {file: manager.put(b"x", file) for file in (f"{name}.cubin", f"{name}.json")}
            manager.put_group(f"{name}.json", files)
        get_cache_manager("cd" * 32).put(b"module", "launcher.so")


def entry(**changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "device": "sm_90", "target": "cuda:90", "chip": {"num_sms": 132},
        "limits": {"max_num_reqs": 1}, "specs": {"a": "b"}, "facts": key_facts(TARGET),
        "kernels": [list(kernel) for kernel in KERNELS],
    }  # fmt: skip
    return Entry(**{**fields, **changes})


def test_a_moved_folder_is_found_by_triton(tmp_path: Path) -> None:
    """Its files stay where they are; a kernel that lost one is reported."""
    stored(tmp_path / "written")
    moved = (tmp_path / "written").rename(tmp_path / "moved")
    assert folder_name(KERNELS[0].key) in {path.name for path in moved.iterdir()}
    with cache_at(tmp_path / "cache"):
        assert not any(is_stored(kernel) for kernel in KERNELS)
        assert all(is_stored(kernel, moved) for kernel in KERNELS)
        assert add_to_cache(moved, KERNELS) == (2, 0)
        assert add_to_cache(moved, KERNELS) == (0, 0)
        for name, key in KERNELS:
            group = get_cache_manager(key).get_group(f"{name}.json")
            assert {Path(path).parents[1] for path in group.values()} == {moved}
        assert Path(get_cache_manager("cd" * 32).get_file("launcher.so")).read_bytes() == b"module"
        (moved / folder_name(KERNELS[0].key) / "first_kernel.cubin").unlink()
        assert [is_stored(kernel) for kernel in KERNELS] == [False, True]
    with cache_at(tmp_path / "another"):
        assert add_to_cache(moved, KERNELS) == (1, 1)
    with cache_at(moved):  # as for a second run of attnlib compile
        assert not is_stored(KERNELS[1])
        assert add_to_cache(moved, KERNELS) == (1, 1)
        assert is_stored(KERNELS[1])


def test_an_entry_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry()
    assert made.needed() == KERNELS and made.differences(TARGET) == []
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    monkeypatch.setattr(triton.knobs.runtime, "override_arch", "sm100")
    differences = made.differences(TARGET)
    assert "DISABLE_PTXAS_OPT: none in the folder, true here" in differences
    assert "option arch: sm90 in the folder, sm100 here" in differences


def test_runs_for_several_servers_share_a_folder(tmp_path: Path) -> None:
    """A run for the same server takes the place of the one before."""
    older, other = entry(facts={"Triton": "3.5"}), entry(limits={"max_num_reqs": 9})
    held = Manifest().add(older).add(other)
    held.write(tmp_path)
    read = Manifest.read(tmp_path)
    assert read == held and read.entries_for(TARGET) == [older, other]
    assert read.add(entry()).entries == (other, entry())
    assert read.differences(TARGET) == []  # those of one run are found
    assert any("3.5 in the folder" in one for one in Manifest().add(older).differences(TARGET))
    (difference,) = read.differences(GPUTarget("cuda", 80, 32))
    assert difference == "no kernels for cuda:80, only for cuda:90"


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="is not a folder of kernels"):
        Manifest.read(tmp_path)
    Manifest().add(entry()).write(tmp_path)
    written = json.loads((tmp_path / MANIFEST).read_text())
    (fields,) = written["entries"]
    for changed in ({**written, "version": 0}, {**written, "entries": [{**fields, "more": 1}]}, []):
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(ContractError, match="another version of attnlib"):
            Manifest.read(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({**written, "entries": [{**fields, "kernels": 3}]}))
    with pytest.raises(ContractError, match="kernels=3 must be of type"):
        Manifest.read(tmp_path)
