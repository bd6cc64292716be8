"""What suites report to in tests."""

import contextlib


class QuietShow:
    """A `Show` that remembers."""

    def __init__(self):
        self.calls, self.samples, self.texts, self.kept = [], 0, [], []

    @contextlib.contextmanager
    def section(self, title, samples):
        self.samples += samples
        yield self.calls.append

    def text(self, text):
        self.texts.append(text)

    def keep(self, result):
        self.kept.append(result)
