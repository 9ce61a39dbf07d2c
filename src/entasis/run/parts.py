"""Whole tensors of a model that may be cut among ranks, and back."""

from __future__ import annotations

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each rank holds a part, on every rank; they call it together. Another as it is."""
    if not hasattr(tensor, "full_tensor"):  # asked so, nothing is imported that one process does not need
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def own(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    if not hasattr(tensor, "to_local"):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor, which every rank has, what this rank holds of it in the way of `like`; on its device."""
    if not hasattr(like, "full_tensor"):
        return full.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(full.to(like.device), mesh, placements, src_data_rank=None)
