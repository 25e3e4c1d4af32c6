"""What tests of the kernels share."""

import pytest

from edgekv import native


@pytest.fixture(params=native.SCHEMA["isa"], scope="module")
def instruction_set(request):
    """Runs a module's tests once with every instruction set that this processor has and the library was built for."""
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
