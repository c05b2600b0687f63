"""The settings of a server from the flags of `dantinox serve`: names, API keys, hosts, models and
adapters.
"""

import argparse
import ipaddress
import os
import re
import socket
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dantinox.files import UserError, quote, wrap_os_errors

if TYPE_CHECKING:
    from dantinox.serve.operations.api_keys import ApiKeys
    from dantinox.serve.pool.model_specs import ModelSpec

API_KEY_VARIABLE = "DANTINOX_API_KEY"
MAX_KEY_LENGTH = 1024
MAX_ALIASES = 100
FREE_LORAS = 4  # adapters that clients can load in addition to those of --lora, by default


def model_aliases(options: argparse.Namespace, name: str) -> dict[str, str]:
    """Returns the names of --alias and the model that each stands for."""
    if len(options.alias) > MAX_ALIASES:
        raise UserError(f"--alias must have at most {MAX_ALIASES} names, got {len(options.alias)}")
    found: dict[str, str] = {}
    for text in options.alias:
        alias, _, model = text.partition("=")
        if not alias.strip() or not alias.isprintable() or len(alias) > 200:
            raise UserError(
                f"--alias must be a printable name of at most 200 characters, got {quote(text)}"
            )
        if alias in found or alias == name:
            raise UserError(f"--alias: {quote(alias)} is already a name of the model")
        found[alias] = model or name
    return found


def server_keys(options: argparse.Namespace) -> "ApiKeys":
    """Returns the API keys of --api_keys, or the single one; clients must send one of them, unless
    there is none.
    """
    from dantinox.serve.operations.api_keys import ApiKeys, read_keys, single_key

    if options.api_keys is None:
        key = _key(options)
        return ApiKeys(() if key is None else [single_key(key)])
    also = API_KEY_VARIABLE if API_KEY_VARIABLE in os.environ else "--api_key_file"
    if also == API_KEY_VARIABLE or options.api_key_file is not None:
        raise UserError(f"--api_keys and {also} both set keys: use one of them")
    if options.no_auth:
        raise UserError(f"--no_auth and keys ({options.api_keys}) contradict each other")
    return ApiKeys(read_keys(options.api_keys), options.api_keys)


def _key(options: argparse.Namespace) -> str | None:
    """Returns the key of --api_key_file or of the environment, which clients must send; None: they
    need none.
    """
    given = os.environ.get(API_KEY_VARIABLE)
    if options.api_key_file is not None and given is not None:
        raise UserError(f"--api_key_file and {API_KEY_VARIABLE} both set the key: use one of them")
    key = given
    where = API_KEY_VARIABLE
    if options.api_key_file is not None:
        where = str(options.api_key_file)
        with (
            wrap_os_errors(f"cannot read the key {options.api_key_file}"),
            options.api_key_file.open("rb") as file,
        ):
            key = file.read(MAX_KEY_LENGTH + 2).decode("ascii", "replace").strip()
    if key is not None and not re.fullmatch(rf"[!-~]{{8,{MAX_KEY_LENGTH}}}", key):
        raise UserError(
            f"the API key of {where} must be 8 to {MAX_KEY_LENGTH}"
            " printable ASCII characters without spaces"
        )
    if key is not None and options.no_auth:
        raise UserError(f"--no_auth and a key ({where}) contradict each other")
    if key is None and not options.no_auth and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host} exposes this server to other machines: give --api_keys,"
            f" --api_key_file, {API_KEY_VARIABLE} or --no_auth"
        )
    return key


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_hosts(options: argparse.Namespace) -> frozenset[str]:
    """Returns the host names that requests may use.

    A server that listens on all addresses accepts the machine's host name and any IP address.
    """
    from dantinox.serve.options import LOCAL_HOSTS

    host: str = options.host.lower()
    names = {f"[{host}]" if ":" in host else host}
    if host in ("0.0.0.0", "::", ""):
        names = {"ip", socket.gethostname().lower()}
    for name in options.allow_host:
        if name != "*" and not re.fullmatch(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]", name.lower()):
            raise UserError(
                "--allow_host must be a host name or address without a port, or *, got"
                f" {quote(name)}"
            )
    return LOCAL_HOSTS | names | {name.lower() for name in options.allow_host}


def checked_origin(origin: str) -> str:
    if origin not in ("*", "null") and not re.fullmatch(
        r"https?://[a-z0-9_.:\[\]-]+", origin.lower()
    ):
        raise UserError(
            f"--cors must be an origin like https://a.example, or *, got {quote(origin)}"
        )
    return origin.lower()


def model_name(options: argparse.Namespace) -> str:
    name: str = options.run_dir.resolve().name if options.name is None else options.name
    if not name.strip() or not name.isprintable() or len(name) > 200:
        raise UserError(
            f"--name must be a printable name of at most 200 characters, got {quote(name)}"
        )
    return name


def model_specs(
    options: argparse.Namespace, name: str, settings: Mapping[str, object]
) -> "list[ModelSpec]":
    """Returns the models of the server: the first one of RUN, then those of --model and
    --models.
    """
    from dantinox.config.engine_options import EngineOptions
    from dantinox.serve.pool.model_specs import (
        NUMBERS,
        ModelSpec,
        check_model_name,
        check_names,
        read_models,
    )

    sizes: dict[str, Any] = {
        "slots": options.slots,
        "context": options.context,
        "queue": options.queue,
        "background": tuple(options.warm_up),
        "max_loras": _max_loras(options),
        "max_lora_rank": options.max_lora_rank,
        "prefill_rows": options.prefill_rows,
        "prefix_cache": options.prefix_cache,
        "cache_dir": options.cache_dir,
    }
    first = {
        "run_dir": options.run_dir,
        "lora": _loras(options),
        "chat_template": options.chat_template,
    }
    given: list[tuple[str, dict[str, Any]]] = [(name, first)]
    for text in options.model:
        other, equals, path = text.partition("=")
        if not (other and equals and path):
            raise UserError(f"--model must be NAME=PATH, got {quote(text)}")
        given.append((check_model_name(other, "a name of --model"), {"run_dir": Path(path)}))
    given += [] if options.models is None else read_models(options.models).items()
    check_names([other for other, _ in given])

    def make_spec(number: int, name: str, fields: Mapping[str, Any]) -> ModelSpec:
        loras = fields.get("lora", {})
        own = sizes | {key: fields[key] for key in NUMBERS if key in fields}
        if own["prefix_cache"] is not None:
            own["prefix_cache"] *= 10**6  # given in MB
        if len(given) > 1 and options.cache_dir is not None:
            own["cache_dir"] = options.cache_dir / f"model-{urllib.parse.quote(name, safe='')}"
        if number and options.lora_dir is not None and options.max_loras is None:
            own["max_loras"] = len(loras) + FREE_LORAS
        template = fields.get("chat_template", options.chat_template)
        combined = {**settings, **fields.get("settings", {})}
        return ModelSpec(
            name,
            fields["run_dir"],
            loras,
            template,
            options.tool_format,
            combined,
            EngineOptions(**own),
        )

    return [make_spec(number, *one) for number, one in enumerate(given)]


def _loras(options: argparse.Namespace) -> dict[str, Path]:
    """Returns the paths of the adapters by name."""
    found: dict[str, Path] = {}
    for given in options.lora:
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise UserError(f"--lora must be NAME=PATH, got {quote(given)}")
        if name in found:
            raise UserError(f"--lora has the name {quote(name)} twice")
        found[name] = Path(path)
    if options.lora_dir is not None and not options.lora_dir.is_dir():
        raise UserError(f"--lora_dir: no directory at {options.lora_dir}")
    if options.lora_dir is not None and options.no_auth and not is_loopback(options.host):
        raise UserError(
            "--lora_dir lets clients change the adapters of this server:"
            " give it a key instead of --no_auth"
        )
    return found


def _max_loras(options: argparse.Namespace) -> int | None:
    """Returns the most adapters that can be loaded at the same time; None: those of --lora, without
    changes.
    """
    if options.max_loras is None and options.lora_dir is not None:
        return len(options.lora) + FREE_LORAS
    limit: int | None = options.max_loras
    return limit
