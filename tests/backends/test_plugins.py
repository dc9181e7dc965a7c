"""Entry points of installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest

import attnlib
from attnlib.backends import plugins
from attnlib.backends.plugins import ENTRY_POINT_GROUP, PluginBackend, find_plugins


def test_entry_points_are_listed_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "simulated-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated\nVersion: 1.0\n")
    arguments = ("Mine", "package.module:Class", ENTRY_POINT_GROUP)
    provided = EntryPoint(*arguments)._for(PathDistribution(folder))
    points = [provided, EntryPoint(*arguments)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    assert find_plugins() == [
        PluginBackend("mine", "package.module:Class", "simulated"),
        PluginBackend("mine", "package.module:Class", "an unknown package"),
    ]


def test_damaged_metadata_of_any_package_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(group: str) -> None:
        raise ValueError("bad METADATA")

    monkeypatch.setattr(plugins, "entry_points", damaged)
    with pytest.warns(UserWarning, match="cannot be listed: ValueError: bad METADATA"):
        assert find_plugins() == []
    assert "torch" in attnlib.list_backends()
