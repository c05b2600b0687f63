"""`dantinox serve`: its flags, and the startup of the server."""

import argparse
import importlib.util
import logging
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.cli.common import add_chat_template, add_run, given_settings, use_compilation_cache
from dantinox.cli.server_settings import (
    API_KEY_VARIABLE,
    allowed_hosts,
    checked_origin,
    is_loopback,
    model_aliases,
    model_name,
    model_specs,
    server_keys,
)
from dantinox.config.flags import Parser, add_config_flags
from dantinox.config.help_pages import FlagSection
from dantinox.files import UserError, install_command, quote, wrap_os_errors

if TYPE_CHECKING:
    from dantinox.serve.operations.reload import Reloader
    from dantinox.serve.options import Options
    from dantinox.serve.pool.model_specs import ModelSpec
    from dantinox.serve.server import RunnableEngine

REQUIRED_MODULES = ("starlette", "uvicorn", "prometheus_client", "llguidance")


MOST_USED = (
    "host", "port", "api_key_file", "name", "chat_template", "lora", "slots", "context", "queue",
    "weights", "kv_dtype", "kv_budget", "max_new_tokens", "temperature", "top_p",
)  # fmt: skip


def add_serve_flags(command: Parser) -> None:
    add_run(command)
    _add_network_flags(command.section("network", "Address, API key, allowed hosts and origins"))
    _add_capacity_flags(command.section("capacity", "Slots, context and queue"))
    _add_operations_flags(command.section("operations", "Logs, traces and names of the model"))
    _add_models_flags(command.section("models", "Several models in one server"))
    _add_adapters_flags(command.section("adapters", "Low-rank adapters that requests select"))
    add_chat_template(command)
    command.add_argument(
        "--tool_format",
        default="auto",
        metavar="NAME",
        help="notation of tool calls (default: that of the chat template)",
    )
    command.add_argument(
        "--pooling",
        choices=("mean", "last"),
        default="mean",
        help="how embeddings combine the hidden states of a text (default: mean)",
    )
    command.add_argument(
        "--name", help="model name that clients see (default: name of the run directory)"
    )
    command.add_argument(
        "--lite", type=Path, metavar="PATH", help="copy of Kobold Lite to serve at /lite"
    )
    add_config_flags(command, ("generation", "router", "kv"), MOST_USED)


def _add_network_flags(network: FlagSection) -> None:
    network.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1; a non-loopback address needs a key)",
    )
    network.add_argument(
        "--port",
        type=_number(0, 65535),
        default=8000,
        help="port; 0: a free one, which is printed (default: 8000)",
    )
    network.add_argument(
        "--api_key_file",
        type=Path,
        metavar="FILE",
        help=f"file with the API key for clients (or set {API_KEY_VARIABLE})",
    )
    network.add_argument(
        "--api_keys",
        type=Path,
        metavar="FILE",
        help="YAML or JSON file with several keys, their names and their limits",
    )
    network.add_argument(
        "--no_auth",
        action="store_true",
        help="accept requests without a key from anyone who can reach the server",
    )
    network.add_argument(
        "--allow_host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="additional host names that requests may use; *: any",
    )
    network.add_argument(
        "--cors",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins whose web pages may send requests; *: any",
    )


def _add_capacity_flags(capacity: FlagSection) -> None:
    capacity.add_argument(
        "--slots",
        type=_number(1, 1024),
        metavar="N",
        help="requests decoded together (default: as memory allows)",
    )
    capacity.add_argument(
        "--context",
        type=_number(2, 2**31 - 1),
        metavar="N",
        help="longest sequence in tokens (default: the model's)",
    )
    capacity.add_argument(
        "--queue",
        type=_number(0, 2**20),
        default=64,
        metavar="N",
        help="prompts that may wait for a slot (default: 64)",
    )
    capacity.add_argument(
        "--prefill_rows",
        type=_number(1, 16),
        metavar="N",
        help=(
            "prompt chunks that one program prefills together"
            " (default: 4 on an accelerator, 1 on a CPU)"
        ),
    )
    capacity.add_argument(
        "--prefix_cache",
        type=_number(0, 2**24),
        metavar="MB",
        help=(
            "memory for the keys of earlier prompts; 0: none (default: 4 × that of the slots, at"
            " most 1/8 of the free memory)"
        ),
    )
    capacity.add_argument(
        "--cache_dir",
        type=Path,
        metavar="DIR",
        help="folder that keeps the keys of earlier prompts when the server stops",
    )
    capacity.add_argument(
        "--store_responses",
        type=_number(0, 2**20),
        default=0,
        metavar="N",
        help="responses of /v1/responses kept in memory for previous_response_id (default: 0)",
    )
    capacity.add_argument(
        "--warm_up",
        nargs="*",
        choices=("steps", "echo", "embeddings", "strategies"),
        default=["steps", "echo"],
        metavar="NAME",
        help=(
            "programs to compile in the background once the server is ready: steps (all sampling"
            " steps instead of the usual ones), echo, embeddings, strategies (default: steps echo)"
        ),
    )


def _add_operations_flags(operations: FlagSection) -> None:
    operations.add_argument(
        "--log",
        choices=("text", "json"),
        help="log a line for each request, and all messages in this format (default: errors only)",
    )
    operations.add_argument(
        "--otel",
        action="store_true",
        help="send traces with OpenTelemetry; its environment variables select the collector",
    )
    operations.add_argument(
        "--alias",
        nargs="+",
        default=[],
        metavar="NAME[=MODEL]",
        help="additional names that clients may use for the model",
    )


def _add_models_flags(models: FlagSection) -> None:
    models.add_argument(
        "--model",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="further runs, loaded when a request names them",
    )
    models.add_argument(
        "--models",
        type=Path,
        metavar="FILE",
        help="YAML or JSON file of further models, with their own slots and settings",
    )
    models.add_argument(
        "--max_models",
        type=_number(1, 100),
        metavar="N",
        help="most models loaded together (default: all)",
    )
    models.add_argument(
        "--model_memory",
        type=_bytes,
        metavar="SIZE",
        help="memory of all loaded models, such as 12GB (default: no bound)",
    )


def _add_adapters_flags(adapters: FlagSection) -> None:
    adapters.add_argument(
        "--lora",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="adapters: runs with adapters of this run, or PEFT folders",
    )
    adapters.add_argument(
        "--max_loras",
        type=_number(1, 1024),
        metavar="N",
        help="most adapters loaded together (default: those of --lora)",
    )
    adapters.add_argument(
        "--max_lora_rank",
        type=_number(1, 4096),
        metavar="N",
        help="largest rank of an adapter (default: that of --lora)",
    )
    adapters.add_argument(
        "--lora_dir",
        type=Path,
        metavar="DIR",
        help="let clients load the adapters of this directory (with room for 4 more)",
    )


def serve(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code: 0 after a signal if every request was
    answered.
    """
    if any(importlib.util.find_spec(name) is None for name in REQUIRED_MODULES):
        raise UserError(
            f"`dantinox serve` needs packages that are not installed: {install_command('serve')}"
        )
    settings = given_settings(options)
    keys = server_keys(options)
    hosts = allowed_hosts(options)
    origins = tuple(checked_origin(origin) for origin in options.cors)
    name = model_name(options)
    aliases = model_aliases(options, name)
    specs = model_specs(options, name, settings)
    _check_flags(options, len(specs))
    _make_cache_folders(specs)
    from dantinox.serve.operations.spans import make_provider
    from dantinox.serve.pool.model_specs import file_bytes
    from dantinox.serve.server import listen

    weights = {spec.name: file_bytes(spec) for spec in specs}
    provider = make_provider() if options.otel else None
    with listen(options.host, options.port) as listener:
        use_compilation_cache()
        from dantinox.serve.operations.request_log import configure_logging
        from dantinox.serve.operations.spans import close_provider, trace_exporter
        from dantinox.serve.options import Options
        from dantinox.serve.server import serve as run_server

        if options.log is not None:
            configure_logging(options.log)
        server_options = Options(
            tool_format=options.tool_format,
            hosts=hosts,
            origins=origins,
            lite=options.lite,
            stored_responses=options.store_responses,
            pooling=options.pooling,
            lora_dir=options.lora_dir,
            keys=keys,
            aliases=aliases,
        )
        if provider is not None:
            server_options = replace(server_options, export_trace=trace_exporter(provider))
        app, engine, reloader = _make_app(options, specs, server_options, weights)
        where = _address(listener)
        names = ", ".join(spec.name for spec in specs)
        if options.no_auth and not is_loopback(options.host):
            _report(
                options,
                logging.WARNING,
                f"anyone who can reach {where} can use this server, because it has no key",
            )
        _report(options, logging.INFO, f"{name} is loaded; compiling its programs")

        def print_ready() -> None:
            verb = "is" if len(specs) == 1 else "are"
            print(
                f"{names} {verb} served at {where} (a web page; OpenAI: {where}/v1, KoboldAI:"
                f" {where}/api)",
                flush=True,
            )

        code = run_server(app, engine, listener, server_options.limits, print_ready, reloader)
        if provider is not None:
            close_provider(provider)
        return code


def _make_app(
    options: argparse.Namespace,
    specs: "list[ModelSpec]",
    server_options: "Options",
    weights: Mapping[str, int],
) -> "tuple[Any, RunnableEngine, Reloader]":
    """Loads the only model, or makes a pool of several; returns the ASGI app, its engine and what
    rereads keys and weights.

    Args:
      weights: bytes of the weights of each model by name.
    """
    from dantinox.serve.app import make_app
    from dantinox.serve.operations.reload import Reloader
    from dantinox.serve.pool.model_loading import open_model
    from dantinox.serve.pool.model_pool import ModelPool
    from dantinox.serve.pool.pool_app import make_pool_app

    if len(specs) == 1:
        opened = open_model(specs[0])
        reloader = Reloader(server_options.keys, opened.reload_weights)
        server_options = replace(server_options, template=opened.template, reloader=reloader)
        return make_app(opened.engine, server_options), opened.engine, reloader
    bounds: dict[str, Any] = {"max_models": options.max_models, "memory": options.model_memory}
    pool = ModelPool(specs, open_model, sizes=weights, **bounds, queue=options.queue)
    reloader = Reloader(server_options.keys, pool.reload_weights)
    return make_pool_app(pool, replace(server_options, reloader=reloader)), pool, reloader


def _check_flags(options: argparse.Namespace, models: int) -> None:
    """Raises a UserError for flags that have no effect with this number of models, and for a
    missing file of --lite.
    """
    if models == 1 and (options.max_models or options.model_memory):
        raise UserError(
            "--max_models and --model_memory need several models: give --model or --models"
        )
    if options.cache_dir is not None and options.prefix_cache == 0:
        raise UserError(
            "--cache_dir keeps the keys of the prefix cache: leave it out with --prefix_cache 0"
        )
    if options.lite is not None and not options.lite.exists():
        raise UserError(f"--lite: no file or folder at {options.lite}")


def _make_cache_folders(specs: "list[ModelSpec]") -> None:
    """Creates the folders of --cache_dir. Only this user may read them, because the files contain
    the tokens of prompts.
    """
    for spec in specs:
        folder = spec.options.cache_dir
        if folder is not None:
            with wrap_os_errors(f"cannot create --cache_dir {folder}"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _report(options: argparse.Namespace, level: int, message: str) -> None:
    """Writes a message to standard error: in the format of --log if it is given, otherwise as a
    plain line.
    """
    if options.log is not None:
        logging.getLogger("dantinox.serve").log(level, "%s", message)
    else:
        print(
            f"warning: {message}" if level == logging.WARNING else message,
            file=sys.stderr,
            flush=True,
        )


def _bytes(text: str) -> int:
    """Returns the bytes of a size such as `12GB` or `500MB`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(MB|GB)", text)
    size = 0 if found is None else round(float(found[1]) * {"MB": 10**6, "GB": 10**9}[found[2]])
    if not size:
        raise argparse.ArgumentTypeError(
            f"must be a number of MB or GB above 0, such as 12GB, got {quote(text)}"
        )
    return size


def _number(low: int, high: int) -> Any:
    """Returns the type of a flag whose value is an integer in [low, high]."""

    def read(text: str) -> int:
        if (
            not text.isascii()
            or not text.isdecimal()
            or len(text) > 12
            or not low <= int(text) <= high
        ):
            raise argparse.ArgumentTypeError(
                f"must be an integer in [{low}, {high}], got {quote(text)}"
            )
        return int(text)

    return read


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
