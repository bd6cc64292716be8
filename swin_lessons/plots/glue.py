"""Give a number a name, so that the prose quotes what was computed and nothing is typed twice."""

from typing import Any


def glue(name: str, value: Any) -> None:
    """Store `value` in the notebook under `name`; the page quotes it with the glue role of MyST-NB.

    Where MyST-NB is not installed (Colab, a plain Jupyter) there is no page to fill, and nothing happens.
    """
    try:
        from myst_nb import glue as store
    except ImportError:
        return
    store(name, value, display=False)
