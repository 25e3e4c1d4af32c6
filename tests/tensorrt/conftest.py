import sys
from pathlib import Path

import pytest
from emulated import Emulated

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))


@pytest.fixture(scope="session")
def library() -> Emulated:
    return Emulated()


@pytest.fixture
def emulated(library) -> Emulated:
    """The emulated kernels in their plainest order, with every barrier in place."""
    library.order(0)
    library.drop("")
    return library
