import pytest

from .small import Workshop


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)
