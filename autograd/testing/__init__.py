"""What property tests need: `gradcheck`, Hypothesis strategies, and samples of every op.

`gradcheck` needs nothing; `arrays`, `shapes` and `SAMPLES` need Hypothesis (extra `test`).
"""

from typing import TYPE_CHECKING, Any

from .gradcheck import gradcheck
from .tolerances import tolerance

if TYPE_CHECKING:
    from .samples import SAMPLES
    from .strategies import arrays, broadcastable, shapes

__all__ = ["SAMPLES", "arrays", "broadcastable", "gradcheck", "shapes", "tolerance"]


def __getattr__(name: str) -> Any:
    if name in ("arrays", "shapes", "broadcastable"):
        from . import strategies

        return getattr(strategies, name)
    if name == "SAMPLES":
        from .samples import SAMPLES

        return SAMPLES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
