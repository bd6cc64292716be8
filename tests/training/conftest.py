import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small sums on many threads are slower and, on some builds, not repeatable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
