from unittest.mock import patch

import pytest
from training.small import cached_programs

from dantinox.training import loop


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Runs of a file with equal settings share their programs."""
    with patch.object(loop, "Programs", cached_programs()):
        yield
