"""Without a GPU, Triton's kernels run in its interpreter. It is chosen once, before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
