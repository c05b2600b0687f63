"""The subprocess that renders chat templates, with limits on time and memory.

It is run as a program, never imported. It reads lines of JSON, each a question with the template, the variables that it
always has and a list of conversations, and answers each with a line: the texts, or `{"error": …}`, or `{"refusal": …}`.
Nothing but the standard library and Jinja is loaded here. The surroundings of a template are those of transformers
(`apply_chat_template`): the immutable sandbox, trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson`
that does not escape HTML, and `{% generation %}` blocks, which change nothing.
"""

import contextlib
import json
import resource
import sys
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.debug  # loaded by Jinja when something goes wrong, and no file can be opened then
import jinja2.ext
import jinja2.nodes
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

# The limits of one answer: seconds of CPU time, bytes of memory, characters of output.
CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS = (int(number) for number in sys.argv[1:])


class Refusal(jinja2.TemplateError):
    """What a template says by `raise_exception`."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: what is inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(inside, lineno=line)


class SafeNamespace(jinja2.utils.Namespace):
    """`namespace(…)`, of which no name begins with an underscore."""

    def __init__(self, *args: Any, **names: Any) -> None:
        found = dict(*args, **names)
        for name in found:
            check_public_name(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        check_public_name(name)
        super().__setitem__(name, value)


def check_public_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


def make_environment() -> ImmutableSandboxedEnvironment:
    """What a template sees besides its messages."""

    def raise_exception(message: Any) -> None:
        raise Refusal(str(message))

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": SafeNamespace,
        "dict": lambda *args, **names: dict(*args, **names),
    }
    return made


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The text of one conversation.

    Raises:
      ValueError: it is too long.
    """
    text, size = [], 0
    for part in template.generate(values):
        text.append(part)
        size += len(part)
        if size > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS:,} characters")
    return "".join(text)


def limit_cpu_time(seconds: int) -> None:
    """Ends this process when it has computed for so many seconds more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower_limit(
        resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]
    )


def lower_limit(what: int, most: int, hard: int) -> None:
    """Sets a limit, and the one that it can be raised to, where the system knows it and does not set a lower one."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def restrict_process() -> None:
    """Takes from this process what a template has no use for: memory without end, files, other processes."""
    time.localtime()  # which reads a file
    make_environment().from_string("{{ '\\n' }}").render()  # loads a codec
    limits = {"RLIMIT_AS": MEMORY_BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 3, "RLIMIT_NPROC": 0}
    for name, most in limits.items():
        lower_limit(getattr(resource, name), most, most)


def describe_error(error: BaseException) -> dict[str, str]:
    """What went wrong, on one line."""
    if isinstance(error, MemoryError):
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB"}
    words = " ".join(str(error).split()) or type(error).__name__
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return {"refusal" if isinstance(error, Refusal) else "error": words[:200] + line}


@lru_cache(maxsize=1)
def compile_template(source: str, variables: str) -> jinja2.Template:
    """A template with the variables, an object of JSON, that it always sees."""
    return make_environment().from_string(source, globals=json.loads(variables))


def answer(line: bytes) -> Any:
    """The texts of the conversations of a question, or what went wrong."""
    limit_cpu_time(CPU_SECONDS)
    try:
        asked = json.loads(line)
        template = compile_template(asked["template"], asked["variables"])
        return [render(template, values) for values in asked["conversations"]]
    except Exception as error:
        return describe_error(error)


if __name__ == "__main__":
    restrict_process()
    for question in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(answer(question)).encode() + b"\n")
        sys.stdout.buffer.flush()
