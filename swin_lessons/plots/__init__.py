"""Figures of the lessons. Imported by notebooks only; needs matplotlib."""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError('figures need matplotlib: pip install "swin-lessons[plots]"') from error
