"""attnlib in SGLang's own plug-in framework and command line; run by `test_sglang.py`.

The module of SGLang's registry imports torchvision, which is not installed: its decorator is
replaced. The base class of backends is read as source for the same reason.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

REGISTERED: dict[str, Any] = {}


def main() -> None:
    registry = ModuleType("sglang.srt.layers.attention.attention_registry")
    registry.register_attention_backend = lambda name: (  # type: ignore[attr-defined]
        lambda create: REGISTERED.setdefault(name, create)
    )
    sys.modules[registry.__name__] = registry
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.plugins import load_plugins_by_group

    register, distribution = load_plugins_by_group("sglang.srt.plugins")["attnlib"]
    assert distribution == "attnlib"
    assert "attnlib" not in ATTENTION_BACKEND_CHOICES
    register()
    assert "attnlib" in ATTENTION_BACKEND_CHOICES and list(REGISTERED) == ["attnlib"]
    check_methods()


def check_methods() -> None:
    """Every public method of the adapter is one of SGLang's, with the same leading parameters."""
    package = Path(importlib.util.find_spec("sglang").origin).parent  # type: ignore[union-attr, arg-type]
    base = methods(package / "srt/layers/attention/base_attn_backend.py", "AttentionBackend")
    import attnlib.integrations.sglang as integration

    source = Path(integration.__file__).with_name("backend.py")
    ours = methods(source, "AttnlibAttentionBackend")
    public = {name for name in ours if not name.startswith("_")}
    assert len(public) == 6 and public <= base.keys(), public - base.keys()
    for name in public - {"forward_decode"}:  # takes any arguments
        assert ours[name][: len(base[name])] == base[name], (name, ours[name], base[name])


def methods(source: Path, name: str) -> dict[str, list[str]]:
    """Positional parameters of the methods of a class."""
    (found,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in found.body
        if isinstance(node, ast.FunctionDef)
    }


if __name__ == "__main__":
    main()
