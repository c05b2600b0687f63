from unittest.mock import patch

import pytest

from dantinox.training import loop

from .small import Workshop, cached_programs


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Runs of a file with equal settings share their programs. A test with other processes compiles them again."""
    with patch.object(loop, "Programs", cached_programs()):
        yield
