import pytest
import tiny_bundle

from edgekv import engine
from edgekv.generation.session import Session


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    return tiny_bundle.make(tmp_path_factory.mktemp("quality") / "full", keep="full", kept=4096, element="fp32")


@pytest.fixture(scope="session")
def window(tmp_path_factory):
    """The same weights as `full`, 48 + 32 tokens."""
    return tiny_bundle.make(
        tmp_path_factory.mktemp("quality") / "window", keep="window", kept=48, positions="original", element="fp32"
    )


@pytest.fixture
def session_of():
    """session_of(bundle, rows) -> Session; engines are closed at the end of the test."""
    opened = []

    def make(bundle, rows=1):
        opened.append(engine.load(bundle, 1, max_rows=rows))
        return Session(opened[-1])

    yield make
    for loaded in opened:
        loaded.close()
