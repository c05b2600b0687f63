"""A server process with an engine without a model: `python -m tests.serve.process PAUSE [stuck |
--keys FILE]`.
"""

import asyncio
import logging
import sys
import threading
import time
from pathlib import Path

from dantinox.serve.app import make_app
from dantinox.serve.errors import Unavailable
from dantinox.serve.operations.api_keys import ApiKeys, read_keys
from dantinox.serve.operations.limits import Limits
from dantinox.serve.operations.reload import Reloader
from dantinox.serve.operations.request_log import configure_logging
from dantinox.serve.options import Options
from dantinox.serve.server import listen, serve

from .fakes import FakeEngine


class FakeRunning(FakeEngine):
    """Loads for a moment, drains like a real engine, and fails at the prompt "fault".

    Attributes:
      stuck: whether closing the engine blocks, as it does during a compilation.
      may_load: if set, the engine loads until this event.
    """

    stuck, may_load = False, None

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.state = "loading"

    def start(self):
        threading.Thread(target=self.load, daemon=True).start()

    def load(self):
        if self.may_load is None:
            time.sleep(0.3)
        else:
            self.may_load.wait(30)
        self.state = "ready"

    async def drain(self, seconds):
        self.state = "draining"
        until = asyncio.get_running_loop().time() + seconds
        while self.tasks and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    def close(self):
        self.state = "failed"
        while self.stuck:
            time.sleep(1)

    def submit(self, ask):
        if ask.ids == tuple(b"fault"):
            self.state, self.fails = "failed", Unavailable("the engine has failed")
            threading.Thread(target=self.on_failure).start()
        return super().submit(ask)


if __name__ == "__main__":
    engine = FakeRunning(pause=float(sys.argv[1]))
    engine.stuck = "stuck" in sys.argv
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        print("listening", port, flush=True)
        options, reloader = None, None
        if "--keys" in sys.argv:
            path = Path(sys.argv[-1])
            keys = ApiKeys(read_keys(path), path)
            reloader = Reloader(keys)
            options = Options(keys=keys, reloader=reloader)
            configure_logging("json")
            logging.getLogger("dantinox").setLevel(logging.WARNING)
        app = make_app(engine, options)
        sys.exit(
            serve(app, engine, listener, Limits(), lambda: print("ready", flush=True), reloader)
        )
