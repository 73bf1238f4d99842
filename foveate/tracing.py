"""Whether PyTorch runs a function or records it."""

import torch


def exporting() -> bool:
    """Whether the call becomes part of an exported program, which must hold common operations.

    `is_exporting` alone does not do: under `torch.compile` it is True in torch 2.11.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
