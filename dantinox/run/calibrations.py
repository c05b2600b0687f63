"""What was measured on a run's model, as files in its directory: the router's thresholds."""

import json
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError, create_model

from dantinox.config import UserError
from dantinox.config.base import NonNegative, Section
from dantinox.config.router import MEASURED, Scale
from dantinox.run.directory import RunDirectory, atomic_write
from dantinox.run.weights import short, weights_digest

MAX_ROUTER_BYTES = 1 << 20
_NUMBERS: Any = {name: (Scale if name.endswith("_scale") else NonNegative, ...) for name in MEASURED}
_Measured = create_model("_Measured", __base__=Section, **_NUMBERS)
_RouterFile = create_model("_RouterFile", version=(Literal[1], ...), weights=(str, ...), measured=(_Measured, ...))


def save_router_calibration(run: RunDirectory, record: Mapping[str, Any]) -> None:
    """Writes what was measured for the router: `weights` (their digest), `measured` (the numbers of `MEASURED`), and more."""
    atomic_write(run.router, json.dumps({"version": 1, **record}, allow_nan=False) + "\n")


def load_router_calibration(run: RunDirectory) -> dict[str, float] | None:
    """The numbers of `config.router.MEASURED`, or None for a run that was not calibrated; warns if its weights have changed.

    Raises:
      UserError: the file cannot be read, or does not hold exactly these numbers.
    """
    path, again = run.router, f"run `dantinox calibrate --run_dir {run.path} --what router` again"
    try:
        if not path.exists():
            return None
        if path.stat().st_size > MAX_ROUTER_BYTES:
            raise UserError(f"the calibration {path} is larger than {MAX_ROUTER_BYTES >> 20} MiB: {again}")
        found: Any = _RouterFile.model_validate_json(path.read_bytes())
        if found.weights != weights_digest(run):
            warnings.warn(f"the calibration {path} was measured on other weights: {again}", stacklevel=2)
    except OSError as error:
        raise UserError(f"cannot read the calibration {path}: {error.strerror}") from None
    except ValidationError as error:
        where = short("".join(f"{part}: " for part in error.errors()[0]["loc"]))
        raise UserError(f"the calibration {path} is no good ({where}{error.errors()[0]['msg']}): {again}") from None
    return found.measured.model_dump()
