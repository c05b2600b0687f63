"""Server-sent events with JSON. The text is ASCII, because some clients also end a line at other
characters.
"""

import json
from collections.abc import Mapping
from typing import Any

from dantinox.serve.errors import JSON


def data_event(content: JSON) -> bytes:
    """Returns an event without a name."""
    return f"data: {json.dumps(content, allow_nan=False)}\n\n".encode()


def named_event(name: str, content: Mapping[str, Any]) -> bytes:
    """Returns an event with a name."""
    return f"event: {name}\ndata: {json.dumps(content, allow_nan=False)}\n\n".encode()
