"""Writes llms.txt and llms-full.txt into the built site: its pages with one line each, and their
Markdown in one file.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

SUMMARY = 240  # characters of a page's description


def write(app, exception):
    """Handles the event `build-finished`."""
    if exception is not None or app.builder.format != "html":
        return
    folder, env = Path(app.outdir), app.env
    root = env.get_doctree(app.config.root_doc)
    short = [f"# {app.config.project}", "", f"> {first_paragraph(root)}"]
    full: list[str] = []
    for tree in root.findall(addnodes.toctree):
        short += ["", f"## {tree['caption']}", ""]
        for name in (inner for _, entry in tree["entries"] for inner in with_children(env, entry)):
            text = env.get_doctree(name)
            summary = textwrap.shorten(first_paragraph(text), SUMMARY, placeholder=" …")
            short.append(f"- [{env.titles[name].astext()}]({name}.html): {summary}")
            source = Path(env.doc2path(name))
            full += [
                f"<!-- {name} -->",
                markdown(source) if source.suffix == ".md" else text.astext(),
            ]
    (folder / "llms.txt").write_text("\n".join(short) + "\n", encoding="utf-8")
    (folder / "llms-full.txt").write_text("\n\n".join(full) + "\n", encoding="utf-8")


def with_children(env, name: str) -> Iterator[str]:
    yield name
    for child in env.toctree_includes.get(name, ()):
        yield from with_children(env, child)


def first_paragraph(text: nodes.document) -> str:
    found = next(iter(text.findall(nodes.paragraph)), None)
    return "" if found is None else " ".join(found.astext().split())


def markdown(source: Path) -> str:
    """The Markdown of a page; a page that includes a file of the repository is that file."""
    text = source.read_text(encoding="utf-8")
    included = re.fullmatch(r"```\{include\} (\S+)\n```\n", text)
    return (source.parent / included[1]).read_text(encoding="utf-8") if included else text
