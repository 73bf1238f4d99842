"""Hooks of MkDocs: pages from the root of the repository, and a notebook without remote scripts."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
REMOTE = re.compile(
    r"<!-- Load mathjax -->|<!-- MathJax configuration -->|"
    r"<script\b[^>]*>(?:(?!</script>).)*(?:MathJax|mermaid)(?:(?!</script>).)*</script>|"
    r'<script src="">\s*</script>',
    re.DOTALL,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page to the site for each file in `PAGES`."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_site_link, text)))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the loaders of MathJax and Mermaid, which nbconvert adds, from notebooks."""
    return REMOTE.sub("", html) if page.file.src_uri.endswith(".ipynb") else html


def _site_link(link: re.Match[str]) -> str:
    """Point a link to the site; keep only the text if its target is not part of the site."""
    text, target, anchor = link[1], link[2], link[3] or ""
    if target in PAGES:
        return f"[{text}]({PAGES[target]}{anchor})"
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')}{anchor})"
    return text
