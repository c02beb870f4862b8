"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: dev (default), ci, intense."""

import os

import pytest
from hypothesis import HealthCheck, settings

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
