import pytest

from .small import Workshop
from .small import shared_programs as shared_programs  # a fixture


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)
