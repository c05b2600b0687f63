"""Checks the links, anchors and image descriptions of the Markdown files and of the built site.

    python docs/check_links.py docs/_build/html

Links to other sites are not followed; `make docs-linkcheck` does that.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "deploy/README.md",
    "benchmarks/RESULTS.md",
    "docs/**/*.md",
)
MADE = (ROOT / "docs" / "_build", ROOT / "docs" / "reference")  # not on GitHub
SITE_ONLY = re.compile(r"(\.\./)*reference/")  # pages that are made when the site is built
OUR_IMAGES = "_images/"


def markdown_problems() -> Iterator[str]:
    """What is wrong with a link or an image of a Markdown file, as GitHub shows it; yields an empty
    string for a right one.
    """
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        if any(made in path.parents for made in MADE):
            continue
        text = without_code(path.read_text(encoding="utf-8"))
        where = path.relative_to(ROOT)
        for picture in re.findall(r"!\[([^\]]*)\]\(", text) + re.findall(
            r'<img (?:(?!alt=)[^>])*(?:alt="([^"]*)")?[^>]*>', text
        ):
            yield "" if picture.strip() else f"{where}: an image has no alternative text"
        links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
            r'<(?:img|a) [^>]*(?:src|href)="([^"]+)"', text
        )
        for link in links:
            yield from (
                f"{where}: {problem}" if problem else "" for problem in target_problem(path, link)
            )


def without_code(text: str) -> str:
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "code", text)


def target_problem(path: Path, link: str) -> Iterator[str]:
    """One string for a link inside the repository: empty, or what is wrong with it."""
    if urlsplit(link).scheme or SITE_ONLY.match(link):
        return
    file, _, anchor = unquote(link).partition("#")
    target = (path.parent / file).resolve() if file else path
    if not target.exists():
        yield f"{link} does not exist"
    elif anchor and target.suffix == ".md" and anchor not in anchors(target):
        yield f"{link}: no heading has this anchor"
    else:
        yield ""


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a file's headings on GitHub: repeated ones are numbered."""
    source = path.read_text(encoding="utf-8")
    if included := re.fullmatch(r"```\{include\} (\S+)\n(?::.*\n)*```\n", source):
        return anchors((path.parent / included[1]).resolve())
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", source, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = next(n for n in range(1000) if (slug if n == 0 else f"{slug}-{n}") not in found)
        found.add(slug if number == 0 else f"{slug}-{number}")
    return found


class Page(HTMLParser):
    """The links, anchors and undescribed images of a built page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.undescribed: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag != "link" or given.get("rel") in ("stylesheet", "icon"):
            self.links += [value for name in ("href", "src") if (value := given.get(name))]
        if (
            tag == "img"
            and OUR_IMAGES in (given.get("src") or "")
            and not (given.get("alt") or "").strip()
        ):
            self.undescribed.append(str(given.get("src")))


def site_problems(folder: Path) -> Iterator[str]:
    """What is wrong with a link or an image of a built page; yields an empty string for a right
    link.
    """
    pages = {
        path: Page(path) for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts
    }
    for path, page in pages.items():
        where = path.relative_to(folder)
        yield from (
            f"{where}: the image {name} has no alternative text" for name in page.undescribed
        )
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where}: {link} does not exist"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                yield f"{where}: {link}: the page has no such anchor"
            else:
                yield ""


def main(folder: Path) -> int:
    """Prints the problems and a line of counts; returns 1 if there are problems."""
    written, built = list(markdown_problems()), list(site_problems(folder))
    problems = [problem for problem in (*written, *built) if problem]
    print("\n".join(problems), end="\n" if problems else "")
    pages = sum("_static" not in path.parts for path in folder.rglob("*.html"))
    checked = (
        f"{len(written)} links and images of Markdown files, {len(built)} of {pages} built pages"
    )
    print(f"links: {checked}: {f'{len(problems)} problems' if problems else 'all right'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
