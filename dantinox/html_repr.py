"""Short HTML fragments for notebooks, which the `_repr_html_` methods return."""

from collections.abc import Mapping
from html import escape

MAX_TEXT_LENGTH = 4000  # characters of a text that are shown


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Returns an HTML table with a row per item. Title, names and values are escaped."""
    body = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td'
        f' style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<b>{escape(title)}</b><table>{body}</table>"


def html_text(before: str, text: str, note: str) -> str:
    """Returns a generated text in HTML: `before` (the prompt) in grey, then the text, then a note
    in small type.

    All three are escaped, and a text over `MAX_TEXT_LENGTH` characters is truncated.
    """
    shown = text if len(text) <= MAX_TEXT_LENGTH else text[:MAX_TEXT_LENGTH] + " …"
    prompt = before if len(before) <= MAX_TEXT_LENGTH else "… " + before[-MAX_TEXT_LENGTH:]
    style = 'style="white-space:pre-wrap;margin:0"'
    grey = f'<span style="color:#888">{escape(prompt)}</span>' if before else ""
    return f"<pre {style}>{grey}{escape(shown)}</pre><small>{escape(note)}</small>"
