"""Models and bundles that several tests of the exporter share."""

import pytest
import tiny_models

from edgekv.export import exporter
from edgekv.policy import CachePolicy


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Directory of a tiny llama with tied embeddings."""
    return tiny_models.make(tmp_path_factory.mktemp("models") / "llama", "llama-tied")


@pytest.fixture(scope="session")
def llama_bundle(llama, tmp_path_factory):
    """It in single precision, cache included."""
    policy = CachePolicy(element="fp32", boundary=32)
    made = exporter.Options(policy, None, weights="fp32", check_parity=False)
    return exporter.export(str(llama), tmp_path_factory.mktemp("bundles") / "llama", made)
