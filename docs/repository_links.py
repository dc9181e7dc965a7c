"""MkDocs hook: makes links from pages to files of the repository work in the built site.

Pages link to examples, benchmark results and root files by relative path, so the links also work
in a checkout. These files are outside `docs/`, where MkDocs does not look. The hook publishes the
files of `PAGES` as pages of the site, publishes every other linked file under `repository/`, and
rewrites the links.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/attnlib-kv-format-example/README.md": "examples/kv-format.md",
    "examples/attnlib-plugin-example/README.md": "examples/plugin.md",
}
"""Path in the repository -> path in the site. Links to `README.md` go to `index.md`."""

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the root pages."""
    for source, target in PAGES.items():
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of one page and publish the files that they name."""
    folder = Path(page.file.abs_src_path or DOCS).parent

    def replace(match: re.Match[str]) -> str:
        target = _published((folder / match[1]).resolve(), config, files)
        if target is None:
            return match[0]
        start = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(target, start or ".") + (match[2] or "")

    return _LINK.sub(replace, markdown)


def _published(path: Path, config: Any, files: Files) -> str | None:
    """The path in the site of a file of the repository; None if `path` is not such a file."""
    if path.is_dir() and (path / "README.md").exists():
        path = path / "README.md"
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    source = path.relative_to(ROOT).as_posix()
    if source in PAGES:
        return PAGES[source]
    # MkDocs would make a page of a file that ends in .md.
    target = f"repository/{source}{'.txt' if source.endswith('.md') else ''}"
    if files.get_file_from_path(target) is None:
        files.append(File.generated(config, target, abs_src_path=str(path)))
    return target
