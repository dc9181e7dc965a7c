"""Importing, checking and configuring backend classes."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from attnlib.backends import loading
from attnlib.backends.loading import configured, import_backend
from attnlib.backends.torch import TorchBackend
from attnlib.errors import RegistrationError
from tests.fresh_process import run_program


class Other(TorchBackend):
    """The torch backend under another name."""

    @staticmethod
    def get_name() -> str:
        return "other"


def test_paths_to_nested_classes_and_to_other_objects() -> None:
    assert import_backend("attnlib.backends.torch:TorchBackend") is TorchBackend
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionBackend"):
        import_backend("attnlib.backends.torch:TorchBackend.capabilities")
    for path in ("attnlib.backends.torch", ":TorchBackend", "attnlib.backends.torch:"):
        with pytest.raises(RegistrationError, match="write it as 'package.module:Class'"):
            import_backend(path)


def test_equal_plain_settings_give_one_class() -> None:
    first = configured(Other, {"tile": 64, "sizes": [1, 2], "dtype": torch.float16})
    assert configured(Other, {"dtype": torch.float16, "sizes": [1, 2], "tile": 64}) is first
    assert configured(Other, {}) is Other
    different = [{"tile": 64.0}, {"tile": "64"}, {"tile": True}, {"tile": 1}, {"tile": (1,)}]
    assert len({configured(Other, config) for config in different}) == len(different)
    assert pickle.loads(pickle.dumps(first)) is first


def test_large_tensors_with_equal_text_do_not_share_a_class() -> None:
    """D9: objects other than plain data are compared by identity."""
    table = torch.zeros(100_000)
    changed = table.clone()
    changed[50_000] = 1.0
    assert repr(table) == repr(changed)
    first, second = configured(Other, {"table": table}), configured(Other, {"table": changed})
    assert first is not second and configured(Other, {"table": table}) is first
    assert first.config["table"] is table and second.config["table"] is changed


def test_a_list_that_changes_later_does_not_change_the_configuration() -> None:
    sizes = [1, 2]
    backend = configured(Other, {"sizes": sizes})
    sizes.append(3)
    assert backend.config == {"sizes": [1, 2]}


def test_configured_classes_that_nobody_uses_are_freed() -> None:
    """D27: settings that are used once do not stay in memory."""
    gc.collect()
    before = len(loading._configured)
    for index in range(200):
        configured(Other, {"index": index})
    gc.collect()
    assert len(loading._configured) <= before + 1


@pytest.mark.slow
def test_a_worker_process_gets_the_same_class() -> None:
    """A configured class and a pair are unpickled by a process that registered nothing."""
    program = (
        "import pickle, sys, torch, attnlib\n"
        "path = 'attnlib.backends.torch:TorchBackend'\n"
        "attnlib.register_backend('tuned', path, config={'tile': 64})\n"
        "spec = attnlib.AttentionSpec(num_heads=4, head_size=16, dtype=torch.float32)\n"
        "tuned = attnlib.get_attn_backend(spec, 'tuned', 'cpu')\n"
        "pair = attnlib.get_attn_backend(spec, 'prefill:tuned,decode:torch', 'cpu')\n"
        "sys.stdout.write(pickle.dumps((tuned, pair)).hex())"
    )
    reader = (
        "import pickle\n"
        "tuned, pair = pickle.loads(bytes.fromhex('{written}'))\n"
        "print(tuned.config, pair.prefill_backend is tuned, pair.get_name())\n"
        "print(pair.make_builder.__self__ is pair)"
    )
    written = run_program(program)
    assert written.returncode == 0, written.stderr
    read = run_program(reader.format(written=written.stdout))
    assert read.stdout.split("\n") == ["{'tile': 64} True prefill:tuned,decode:torch", "True", ""]
