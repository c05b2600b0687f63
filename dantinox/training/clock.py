"""Time spent on steps, without that of evaluations, samples and checkpoints."""

import time


class Clock:
    """Counts steps and the seconds between `restart` and `pause`."""

    def __init__(self) -> None:
        self.steps = 0
        self._seconds = 0.0
        self._since: float | None = None

    def restart(self) -> None:
        """Goes on counting."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Stops counting until `restart`."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def ms_per_step(self) -> float:
        """Milliseconds per step since this was last asked; to be asked when the device is done with them."""
        running = self._since is not None
        self.pause()
        self._average = self._seconds / self.steps * 1e3 if self.steps else self._average
        self.steps, self._seconds = 0, 0.0
        if running:
            self.restart()
        return self._average

    _average = 0.0
