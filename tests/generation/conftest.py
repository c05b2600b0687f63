import jax
import pytest


@pytest.fixture(autouse=True)
def full_precision():
    """Makes matrix multiplications run in full float32 on every device, because results are
    compared to 1e-5.
    """
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def programs():
    """Returns a function that counts the programs compiled since its last call."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: (count[0], count.__setitem__(0, 0))[0]
    jax.monitoring.unregister_event_duration_listener(listen)
