"""Record what the operations of a step allocate, and how many forwards it made."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Record the bytes of every tensor that an operation makes in new storage."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.sizes: list[int] = []
        self.forwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        outputs = result if isinstance(result, (tuple, list)) else [result]
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in known:
                self.sizes.append(output.numel() * output.element_size())
        self.forwards += func.__name__.startswith("embedding") and args[0].shape[0] == self._vocab_size
        return result
