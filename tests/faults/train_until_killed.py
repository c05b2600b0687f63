"""Trains a small run and kills itself.

    train_until_killed.py DIRECTORY [grpo] [resume] [after N | at SECONDS | slow N | PHASE N]

`grpo`: trains with rewards, from the run `base` next to DIRECTORY.

`PHASE N`: with `grpo`, in the Nth call of a phase: `sampling`, `scoring` or `updating`.

`after N`: when any thread opens, renames, creates or removes a file or directory in the run for the
Nth time. Saving is a sequence of such events, so about every second N is inside a save.

`slow N`: is not killed, but from the Nth step on a step takes half a second.
"""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def main(path, *arguments):
    events = 0

    def watch(event, args):
        nonlocal events
        if event in WATCHED and str(args[0]).startswith(path):
            events += 1
            if "after" in arguments and events == int(arguments[-1]):
                os.kill(os.getpid(), signal.SIGKILL)

    if "at" in arguments:
        threading.Timer(float(arguments[-1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    sys.addaudithook(watch)
    resume = "resume" in arguments and (Path(path) / "run").exists()
    train = train_with_rewards if "grpo" in arguments else train_on_tokens
    train(Path(path), resume, arguments)
    print(events)


def train_with_rewards(path, resume, arguments):
    from training.grpo_runs import grpo_config

    from dantinox.training.launch import launch
    from dantinox.training.rollout_batches import RolloutBatches
    from dantinox.training.rollout_sampler import RolloutSampler
    from dantinox.training.training_log import TrainingLog

    def kill_in(owner, name, number):
        """Replaces a method by one that kills the process in its call with this number."""
        method, calls = getattr(owner, name), 0

        def call(*given, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*given, **options)

        setattr(owner, name, call)

    phases = {
        "sampling": (RolloutSampler, "_answers"),
        "scoring": (RolloutBatches, "_score"),
        "updating": (TrainingLog, "add"),
    }
    for phase, place in phases.items():
        if phase in arguments:
            kill_in(*place, int(arguments[-1]))
    run = path / "run"
    if resume and not (run / "config.yaml").exists():  # killed before the run was complete
        shutil.rmtree(run)
        resume = False
    launch(grpo_config(path.parent), run_dir=run, resume=resume)


def train_on_tokens(path, resume, arguments):
    from training.small import Workshop, small_config, small_store

    config = small_config(
        training__checkpoint_every=4, training__eval_every=8, logging__log_every=1
    )
    store = small_store(config)
    batch = store.batch

    def slow_batch(step):
        time.sleep(0.5 * ("slow" in arguments and step >= int(arguments[-1])))
        return batch(step)

    store.batch = slow_batch

    Workshop(path, sys.stderr).train("run", config, resume=resume, store=store)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:  # the exit code of the command line
        sys.exit(128 + signal.SIGINT)
