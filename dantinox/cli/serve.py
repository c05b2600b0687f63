"""`dantinox serve`: flags, API key, allowed hosts and origins, and the start of the server."""

import argparse
import importlib.util
import ipaddress
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from dantinox.cli.common import add_chat_template, add_run, chosen_template, given_settings, use_compilation_cache
from dantinox.config import UserError, overlay
from dantinox.config.flags import Parser, add_config_flags
from dantinox.files import quote, wrap_os_errors

NEEDED = ("starlette", "uvicorn", "prometheus_client", "llguidance")
KEY = "DANTINOX_API_KEY"
LONGEST_KEY = 1024


def serve_flags(command: Parser) -> None:
    add_run(command)
    command.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1; others need a key)")
    command.add_argument("--port", type=_number(0, 65535), default=8000, help="0: a free one, which is printed (default: 8000)")
    command.add_argument("--slots", type=_number(1, 1024), help="texts that are decoded together (default: as memory allows)")
    command.add_argument("--context", type=_number(2, 2**31 - 1), help="tokens of a text (default: those of the model)")
    command.add_argument("--queue", type=_number(0, 2**20), default=64, help="prompts that wait for a slot (default: 64)")
    command.add_argument("--api_key_file", type=Path, metavar="FILE", help=f"holds the key that clients bring (or: {KEY})")
    command.add_argument("--no_auth", action="store_true", help="let anybody who reaches the server use it")
    command.add_argument("--allow_host", nargs="+", default=[], metavar="NAME", help="names it has besides its own; *: any")
    command.add_argument("--cors", nargs="+", default=[], metavar="ORIGIN", help="pages of others that may ask; *: any")
    add_chat_template(command)
    command.add_argument("--name", help="what clients call the model (default: the name of the run directory)")
    command.add_argument("--lite", type=Path, metavar="PATH", help="a copy of Kobold Lite, to be served at /lite")
    add_config_flags(command, ("generation", "router", "kv"))


def serve(options: argparse.Namespace) -> int:
    """Runs the command; the exit code: 0 when it was ended by a signal and all was answered."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise UserError("a server needs libraries that are not installed: pip install 'dantinox[serve]'")
    settings = given_settings(options)
    key, hosts, origins = _key(options), _hosts(options), tuple(_origin(origin) for origin in options.cors)
    name = _name(options)
    if options.lite is not None and not options.lite.exists():
        raise UserError(f"--lite: there is nothing at {options.lite}")
    from dantinox.run import find_chat_template, load_run_config, open_run

    directory = open_run(options.run_dir, check=False)  # `load` checks it
    config, own = overlay(load_run_config(directory), settings, "command line"), find_chat_template(directory)
    from dantinox.serve.server import listen

    with listen(options.host, options.port) as listener:
        use_compilation_cache()
        from dantinox.generation import load
        from dantinox.serve.app import make_app
        from dantinox.serve.async_engine import AsyncEngine
        from dantinox.serve.options import Options
        from dantinox.serve.server import serve as run_server

        run = load(options.run_dir, config.generation.tensor_parallel)
        template = chosen_template(options, own, run.tokenizer)
        sizes = {"slots": options.slots, "context": options.context, "queue": options.queue}
        engine = AsyncEngine(run, **sizes, name=name, given=settings)
        told = Options(template, key, hosts, origins, options.lite)
        where = _address(listener)
        if options.no_auth and not _is_loopback(options.host):
            print(f"warning: whoever reaches {where} may use this server: it asks for no key", file=sys.stderr)
        print(f"{name} is loaded and warms up", file=sys.stderr, flush=True)

        def ready() -> None:
            print(f"{name} is served at {where} (a web page; OpenAI: {where}/v1, KoboldAI: {where}/api)", flush=True)

        return run_server(make_app(engine, told), engine, listener, told.limits, ready)


def _number(least: int, most: int) -> Any:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be an integer in [{least}, {most}], got {quote(text)}")
        return int(text)

    return read


def _key(options: argparse.Namespace) -> str | None:
    """The key that clients have to bring; None where they need none."""
    given = os.environ.get(KEY)
    if options.api_key_file is not None and given is not None:
        raise UserError(f"--api_key_file and {KEY} both give a key: use one of them")
    key, where = given, KEY
    if options.api_key_file is not None:
        where = str(options.api_key_file)
        with wrap_os_errors(f"cannot read the key {options.api_key_file}"), options.api_key_file.open("rb") as file:
            key = file.read(LONGEST_KEY + 2).decode("ascii", "replace").strip()
    if key is not None and not re.fullmatch(rf"[!-~]{{8,{LONGEST_KEY}}}", key):
        raise UserError(f"the API key of {where} must be 8 to {LONGEST_KEY} letters, digits and signs of ASCII without spaces")
    if key is not None and options.no_auth:
        raise UserError(f"--no_auth and a key ({where}) contradict each other")
    if key is None and not options.no_auth and not _is_loopback(options.host):
        raise UserError(f"--host {options.host} opens this server to others: give --api_key_file, {KEY} or --no_auth")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _hosts(options: argparse.Namespace) -> frozenset[str]:
    """The names under which the server may be asked; at all addresses of a machine these are its own name and any address."""
    from dantinox.serve.options import LOCAL

    host: str = options.host.lower()
    own = {f"[{host}]" if ":" in host else host}
    if host in ("0.0.0.0", "::", ""):
        own = {"ip", socket.gethostname().lower()}
    for name in options.allow_host:
        if name != "*" and not re.fullmatch(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]", name.lower()):
            raise UserError(f"--allow_host must be a name or an address without port, or *, got {quote(name)}")
    return LOCAL | own | {name.lower() for name in options.allow_host}


def _origin(origin: str) -> str:
    if origin not in ("*", "null") and not re.fullmatch(r"https?://[a-z0-9_.:\[\]-]+", origin.lower()):
        raise UserError(f"--cors must be an origin as https://a.example, or *, got {quote(origin)}")
    return origin.lower()


def _name(options: argparse.Namespace) -> str:
    name: str = options.run_dir.resolve().name if options.name is None else options.name
    if not name.strip() or not name.isprintable() or len(name) > 200:
        raise UserError(f"--name must be a printable name of at most 200 characters, got {quote(name)}")
    return name


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
