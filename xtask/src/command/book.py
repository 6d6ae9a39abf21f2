"""Builds the site from docs/ and the pages beside it, and checks its links."""

import html.parser
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "python/README.md"]

root, place, mdbook = map(pathlib.Path, sys.argv[1:])
source, site = place.absolute() / "src", place.absolute() / "html"


class Page(html.parser.HTMLParser):
    """Anchors and local links of a page."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and value and not re.match(r"\w+:|//", value):
                self.links.add(urllib.parse.unquote(value))


def stage():
    """Copies the pages, and the files that they link to, to the same paths, so that links hold."""
    for folder in source, site:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "docs", source / "docs")
    for name in PAGES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, source / name)
    for page in list(source.rglob("*.md")):
        folder = root / page.relative_to(source).parent
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            linked = (folder / target).resolve()
            copy = source / linked.relative_to(root) if linked.is_relative_to(root) else None
            if copy and linked.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(linked, copy)
    for page in list(source.rglob("*.md")):
        page.write_text(re.sub(r"(\]\([^)\s]*)README\.md", r"\1index.md", page.read_text()))
        if page.name == "README.md":
            page.rename(page.with_name("index.md"))
    # mdBook wants the summary at the top of its source.
    summary = (source / "docs/SUMMARY.md").read_text()
    summary = re.sub(r"\]\((?!\.\./)", "](docs/", summary).replace("](../", "](")
    (source / "SUMMARY.md").write_text(summary)
    (source / "docs/SUMMARY.md").unlink()
    shutil.move(source / "docs/book.toml", place / "book.toml")


def broken(pages, path):
    """Yields the links of a page that lead nowhere."""
    for link in pages[path].links:
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        if found.is_dir():
            found /= "index.html"
        if not found.exists():
            yield f"{path.relative_to(site)}: no {link}; is its page in docs/SUMMARY.md?"
        elif anchor and found in pages and anchor not in pages[found].anchors:
            yield f"{path.relative_to(site)}: no heading {link}"


stage()
subprocess.run([mdbook, "build", place, "--dest-dir", site], check=True)
pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
# Their links begin at the root of a server.
pages = {path: page for path, page in pages.items() if path.name not in ("404.html", "toc.html")}
wrong = sorted({line for path in pages for line in broken(pages, path)})
print(*wrong, f"{site}: {len(pages)} pages, {len(wrong)} broken links", sep="\n")
sys.exit(bool(wrong))
