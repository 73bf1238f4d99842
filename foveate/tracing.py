"""Whether PyTorch runs a function or records it."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def exporting() -> bool:
    """Whether the call becomes part of an exported program, which must hold common operations.

    `is_exporting` alone does not do: under `torch.compile` it is True in torch 2.11.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def watched(tensor: Tensor) -> bool:
    """Whether each operation on a tensor must be one of PyTorch's own.

    A compiler, a transform such as `vmap`, a tangent or a mode that counts operations would not
    see what compiled code does.
    """
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return True
    traced = torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0
    tangents = forward_ad._current_level >= 0
    return traced or tangents or torch._C._are_functorch_transforms_active()
