"""The subprocess that renders chat templates, with limits on time and memory.

This module runs as a program and is never imported. Each input line is a JSON request with the
template, its global variables and a list of conversations. Each output line is the list of
responses: the rendered texts of a conversation, `{"error": …}` or `{"refusal": …}`. The process
loads only the standard library and Jinja. The environment of a template is that of Transformers
(`apply_chat_template`): an immutable sandbox, trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that does not escape HTML, and `{% generation %}` blocks, which have no
effect on the text.
"""

import contextlib
import json
import re
import resource
import sys
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2

# Jinja imports it on the first error, when this process is already forbidden to open files.
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

# The limits of one conversation: seconds of CPU time, bytes of memory, characters of output.
CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS = (int(number) for number in sys.argv[1:])


class Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: renders its content."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(inside, lineno=line)


class SafeNamespace(jinja2.utils.Namespace):
    """`namespace(…)` that rejects names that begin with an underscore, with which a template could
    reach Python's classes.
    """

    def __init__(self, *args: Any, **names: Any) -> None:
        values = dict(*args, **names)
        for name in values:
            check_public_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_public_name(name)
        super().__setitem__(name, value)


def check_public_name(name: Any) -> None:
    """Raises a `SecurityError` if a name begins with an underscore."""
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace must not have the name {name!r}")


def make_environment() -> ImmutableSandboxedEnvironment:
    """Creates the Jinja environment of templates."""

    def raise_exception(message: Any) -> None:
        raise Refusal(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        # A NUL marks the name of a special token inside a message and must stay a NUL. The first
        # alternative skips pairs of backslashes, because the message may contain the text
        # "\\u0000".
        return re.sub(r"(\\\\)|\\u0000", lambda match: match[1] or "\0", text)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": SafeNamespace,
        # A function, so that templates do not reach the class.
        "dict": lambda *args, **names: dict(*args, **names),
    }
    return environment


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Renders one conversation.

    Raises:
      ValueError: the text is longer than `MAX_CHARACTERS`.
    """
    text = []
    size = 0
    for part in template.generate(values):
        text.append(part)
        size += len(part)
        if size > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS:,} characters")
    return "".join(text)


def limit_cpu_time(seconds: int) -> None:
    """Lets this process use at most `seconds` more of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower_limit(
        resource.RLIMIT_CPU,
        int(used.ru_utime + used.ru_stime) + 1 + seconds,
        resource.getrlimit(resource.RLIMIT_CPU)[1],
    )


def lower_limit(kind: int, soft: int, hard: int) -> None:
    """Sets the soft and the hard limit of a resource (`RLIMIT_…`), if the system supports the
    limit.
    """
    if hard != resource.RLIM_INFINITY:  # which is −1
        soft = min(soft, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, hard))


def restrict_process() -> None:
    """Limits the memory of this process, and forbids it to open or write files and to start
    processes.
    """
    # These two calls load the time zone file and a codec now, before opening files is forbidden.
    time.localtime()
    make_environment().from_string("{{ '\\n' }}").render()
    limits = {"RLIMIT_AS": MEMORY_BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 3, "RLIMIT_NPROC": 0}
    for name, limit in limits.items():
        lower_limit(getattr(resource, name), limit, limit)


def describe_error(error: BaseException) -> dict[str, str]:
    """Returns the response for an error, with the message on one line."""
    if isinstance(error, MemoryError):
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
    message = " ".join(str(error).split()) or type(error).__name__
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    kind = "refusal" if isinstance(error, Refusal) else "error"
    return {kind: message[:200] + line}


@lru_cache(maxsize=1)
def compile_template(source: str, variables: str) -> jinja2.Template:
    """Compiles a template with its global variables, a JSON object."""
    return make_environment().from_string(source, globals=json.loads(variables))


def render_conversation(
    request: dict[str, Any], conversation: dict[str, Any]
) -> list[str] | dict[str, str]:
    """Returns the texts of a conversation, one for each cut (number of messages, generation
    prompt), or an error response.
    """
    limit_cpu_time(CPU_SECONDS)
    try:
        template = compile_template(request["template"], request["variables"])
        messages = conversation["messages"]
        values = conversation["values"]
        return [
            render(template, values | {"messages": messages[:end], "add_generation_prompt": prompt})
            for end, prompt in conversation["cuts"]
        ]
    except Exception as error:
        return describe_error(error)


def respond(line: bytes) -> Any:
    """Returns the response to each conversation of a request."""
    request = json.loads(line)
    return [render_conversation(request, conversation) for conversation in request["conversations"]]


if __name__ == "__main__":
    restrict_process()
    for request_line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(respond(request_line)).encode() + b"\n")
        sys.stdout.buffer.flush()
