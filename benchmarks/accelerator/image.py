"""Checks that this Python has what the kit does not carry; prints one sentence if it does not."""

import importlib.util
import re
import sys

# Module → the oldest version that works. These are large, or belong to the driver.
REQUIRED = {
    "jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.10", "optax": "0.2.8",
    "orbax.checkpoint": "0.12.4", "numpy": "2.0", "tokenizers": "0.22", "safetensors": "0.4.5",
    "msgpack": "1.0", "yaml": "6.0", "ml_dtypes": "0.5", "jinja2": "3.1.6", "rich": "13.9",
    "regex": "2024.5", "prometheus_client": "0.21", "pip": "22",
}  # fmt: skip
DISTRIBUTIONS = {
    "orbax.checkpoint": "orbax-checkpoint",
    "yaml": "PyYAML",
    "prometheus_client": "prometheus-client",
}


def problems() -> list[str]:
    """Returns what is missing or too old."""
    from importlib.metadata import PackageNotFoundError, version

    found = (
        []
        if sys.version_info[:2] == (3, 12)
        else [f"Python 3.12 (this is {sys.version_info[0]}.{sys.version_info[1]})"]
    )
    for module, least in REQUIRED.items():
        name = DISTRIBUTIONS.get(module, module)
        try:
            installed = version(name)
            present = importlib.util.find_spec(module) is not None
        except (PackageNotFoundError, ModuleNotFoundError):
            present = False
        if not present:
            found.append(f"{name}>={least}")
        elif numbers(installed) < numbers(least):
            found.append(f"{name}>={least} (this is {installed})")
    return found


def numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: 0.12.0.1 as (0, 12, 0, 1)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


if __name__ == "__main__":
    if "--oldest" in sys.argv:  # requirements that an image like those of accelerators satisfies
        exact = ("jax", "jaxlib", "flax")
        print(
            *(
                f"{DISTRIBUTIONS.get(name, name)}{'==' if name in exact else '>='}{least}"
                for name, least in REQUIRED.items()
            )
        )
        sys.exit()
    if missing := problems():
        sys.exit(f"the check needs {', '.join(missing)} in {sys.executable}")
