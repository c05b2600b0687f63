"""A run on disk: its directory, its weights, and what was measured on them. Nothing here imports jax."""

from dantinox.run.calibrations import (
    KV_FORMAT,
    HeadFile,
    KVCalibration,
    head_names,
    load_kv_calibration,
    load_router_calibration,
    read_kv_calibration,
    save_kv_calibration,
    save_router_calibration,
)
from dantinox.run.directory import (
    RunDirectory,
    create_run,
    load_run_config,
    newest_run,
    open_run,
    save_config,
)
from dantinox.run.weights import load_weights, save_weights, weights_digest

__all__ = [
    "HeadFile",
    "KVCalibration",
    "KV_FORMAT",
    "RunDirectory",
    "create_run",
    "head_names",
    "load_kv_calibration",
    "load_router_calibration",
    "load_run_config",
    "load_weights",
    "newest_run",
    "open_run",
    "read_kv_calibration",
    "save_config",
    "save_kv_calibration",
    "save_router_calibration",
    "save_weights",
    "weights_digest",
]
