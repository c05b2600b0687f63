import pytest

from .small import Workshop


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept(compile_once):
    """Every test here trains: all of them share compiled programs."""


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)
