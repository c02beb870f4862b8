"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: dev (default), ci, intense."""

import ctypes
import os
import resource

import pytest
from hypothesis import HealthCheck, settings

from afinar.autograd import get_num_threads, set_deterministic, set_num_threads

# deadline=None: the first call of a kernel compiles it.
_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=15, **_COMMON)
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("intense", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items):
    """Tests marked gpu say why they are skipped where there is no GPU."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        from afinar.autograd.device import why_no_gpu

        if (why := why_no_gpu()) is not None:
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason=why))


def _one_thread():
    """One thread where threads are not the matter: toy kernels would only wait for each other."""
    before = get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


one_thread = pytest.fixture(_one_thread, name="one_thread")
one_thread_per_module = pytest.fixture(_one_thread, name="one_thread_per_module", scope="module")


@pytest.fixture
def deterministic():
    """The order of sums that holds on every device."""
    set_deterministic(True)
    yield
    set_deterministic(False)


@pytest.fixture
def resident():
    """A function: bytes of memory that this process holds and malloc cannot give back.

    What malloc keeps for later comes and goes by megabytes. (The peak of a process says nothing
    about a stretch of it: whatever came before may have held more.)
    """

    def held():
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()

    return held
