"""A run on disk: its directory, its weights, and what was measured on them. Nothing here imports jax."""

from dantinox.run.calibrations import (
    KV_FORMAT,
    HeadFile,
    KVCalibration,
    has_calibration,
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
    save_tokenizer,
)
from dantinox.run.manifest import Damage, answer_for, entry_while_unchanged, log_damage, put, step_damage, write_step_manifest
from dantinox.run.verify import ASIDE, SAVING, Verified, accept_run, own_damage, saved_steps, verify_run
from dantinox.run.weights import load_weights, save_weights, weights_digest

__all__ = [
    "ASIDE",
    "Damage",
    "HeadFile",
    "KVCalibration",
    "KV_FORMAT",
    "RunDirectory",
    "SAVING",
    "Verified",
    "accept_run",
    "answer_for",
    "create_run",
    "entry_while_unchanged",
    "has_calibration",
    "head_names",
    "load_kv_calibration",
    "load_router_calibration",
    "load_run_config",
    "load_weights",
    "log_damage",
    "newest_run",
    "open_run",
    "own_damage",
    "put",
    "read_kv_calibration",
    "save_config",
    "save_kv_calibration",
    "save_router_calibration",
    "save_tokenizer",
    "save_weights",
    "saved_steps",
    "step_damage",
    "verify_run",
    "weights_digest",
    "write_step_manifest",
]
