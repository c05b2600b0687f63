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
    COMPANIONS,
    RunDirectory,
    chat_template_of,
    create_run,
    load_run_config,
    newest_run,
    open_base,
    open_run,
    save_config,
    save_tokenizer,
    take_along,
)
from dantinox.run.manifest import Damage, entry_while_unchanged, log_damage, put, record_files, step_damage, write_step_manifest
from dantinox.run.verify import ASIDE, SAVING, Verified, accept_run, own_damage, saved_steps, verify_run
from dantinox.run.weights import load_weights, save_weights, weights_digest
