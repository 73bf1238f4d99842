"""Hook of MkDocs: show CONTRIBUTING.md and CHANGELOG.md of the repository on the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page to the site for each file in `PAGES`."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_site_link, text)))
    return files


def _site_link(link: re.Match[str]) -> str:
    """Point a link to the site; keep only the text if its target is not part of the site."""
    text, target, anchor = link[1], link[2], link[3] or ""
    if target in PAGES:
        return f"[{text}]({PAGES[target]}{anchor})"
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')}{anchor})"
    return text
