"""The API keys of a server: the file of `--api_keys`, and the search for a client's key."""

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dantinox.config.yaml_files import read_yaml
from dantinox.files import UserError, escape_name, quote
from dantinox.serve.operations.limits import MAX_KEYS
from dantinox.serve.operations.rate_limits import ApiKey, KeyUsage

SECRET = re.compile(r"[!-~]{8,1024}")
SECRET_RULE = "8 to 1024 printable ASCII characters without spaces"
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
FIELDS = ("name", "key", "sha256", *LIMITS, "admin", "models")
MAX_LIMIT = 10**9


class ApiKeys:
    """The keys that a server accepts, and the usage of each. Without keys the server accepts every
    client.

    Attributes:
      path: the file of the keys; None if the keys do not come from a file.
      usage: the usage of each key by its name.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        path: Path | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        self.path = path
        self._clock = clock
        self.usage = dict[str, KeyUsage]()
        self._keys: tuple[ApiKey, ...] = ()
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Replaces all keys at once. A key whose name stays keeps its usage."""
        usage = {}
        for key in keys:
            usage[key.name] = self.usage.get(key.name) or KeyUsage(key, self._clock)
            usage[key.name].change_limits(key)
        self._keys = tuple(keys)
        self.usage = usage

    def usage_of(self, key: ApiKey) -> KeyUsage:
        """Returns the usage of a key; of a key that has been removed meanwhile, usage that nothing
        else reads.
        """
        return self.usage.get(key.name) or KeyUsage(key, self._clock)

    def find(self, secrets: Sequence[bytes]) -> ApiKey | None:
        """Returns the key that one of `secrets` is. The time does not depend on the position or the
        content of a key.
        """
        found = None
        for secret in secrets:
            digest = hashlib.sha256(secret).digest()
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found


def single_key(secret: str, name: str = "default") -> ApiKey:
    """Returns the only key of a server that has no file of keys."""
    return ApiKey(name, hashlib.sha256(secret.encode()).digest())


def read_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """Reads a file of keys, in YAML or JSON: an object with the list `keys`, whose entries have the
    fields `FIELDS`.

    Raises:
      UserError: the file cannot be read, has no keys or more than `MAX_KEYS`, a field is missing or
        wrong, or two keys have the same value or name. The message contains no key.
    """
    path = Path(path)
    tree, _ = read_yaml(path, ("keys",), "keys file")
    entries = tree.get("keys")
    if set(tree) != {"keys"} or not isinstance(entries, list) or not 1 <= len(entries) <= MAX_KEYS:
        raise UserError(f"{path} must have one list, keys, with 1 to {MAX_KEYS} entries")
    keys = [_read_key(entry, f"keys[{number}] of {path}") for number, entry in enumerate(entries)]
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in keys]
        second = next(
            (number for number, value in enumerate(values) if value in values[:number]), None
        )
        if second is not None:
            first = values.index(values[second])
            shown = "name" if what == "name" else "key"
            raise UserError(f"keys[{second}] of {path} has the same {shown} as keys[{first}]")
    return tuple(keys)


def _read_key(entry: object, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be an object with the fields {', '.join(FIELDS)}")
    unknown = next((name for name in entry if name not in FIELDS), None)
    if unknown is not None:
        raise UserError(
            f"{where} has the unknown field {escape_name(unknown)}: the fields are"
            f" {', '.join(FIELDS)}"
        )
    name = entry.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.@-]{1,64}", name):
        raise UserError(
            f"name of {where} must be 1 to 64 letters, digits or characters of _.@-, got"
            f" {quote(name)}"
        )
    limits: dict[str, int | None] = {}
    for field in LIMITS:
        value = entry.get(field)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_LIMIT):
            raise UserError(
                f"{field} of {where} must be an integer in [1, 10^9], or null, got {quote(value)}"
            )
        limits[field] = value
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise UserError(f"admin of {where} must be true or false, got {quote(admin)}")
    models = entry.get("models")
    if models is not None and not (
        isinstance(models, list) and models and all(isinstance(one, str) for one in models)
    ):
        raise UserError(f"models of {where} must be a list of names, or null, got {quote(models)}")
    return ApiKey(
        name,
        _read_digest(entry, where),
        **limits,
        admin=admin,
        models=None if models is None else tuple(models),
    )


def _read_digest(entry: Mapping[str, object], where: str) -> bytes:
    secret = entry.get("key")
    digest = entry.get("sha256")
    if (secret is None) == (digest is None):
        raise UserError(f"{where} must have either key or sha256")
    if secret is not None:
        # YAML reads 12345678 as a number.
        if not isinstance(secret, str) or not SECRET.fullmatch(secret):
            raise UserError(f"key of {where} must be a string of {SECRET_RULE}")
        return hashlib.sha256(secret.encode()).digest()
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise UserError(f"sha256 of {where} must be a string of 64 hexadecimal digits")
    return bytes.fromhex(digest)
