# SPDX-License-Identifier: Apache-2.0
"""What the launchers need from PyTorch: checked arguments, the stream, the device. Imported at the first call only."""

from __future__ import annotations

import functools

import torch

from . import build_info


@functools.cache
def multiprocessors(device: int) -> int:
    """Returns the device's number of SMs."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: int) -> str:
    """Returns the device's architecture as the build names it: 'sm_120a', 'sm_90', or e.g. 'sm_80'."""
    major, minor = torch.cuda.get_device_capability(device)
    return "sm_120a" if (major, minor) == (12, 0) else f"sm_{major}{minor}"


def stream(tensor: torch.Tensor) -> int:
    """Returns the current stream of the tensor's device as an integer."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def refusal(name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int, device: torch.device) -> str | None:
    """Returns why a tensor cannot be passed to a kernel, None when it can; its last dimension must be dense."""
    if tensor.dtype != dtype:
        return f"{name} is {tensor.dtype}, not {dtype}"
    if tensor.dim() != dims:
        return f"{name} has {tensor.dim()} dimensions, not {dims}"
    if tensor.device != device or tensor.device.type != "cuda":
        return f"{name} is on {tensor.device}"
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return f"{name} is not dense in its last dimension"
    return None


def first_refusal(device: torch.device, *wanted: tuple[str, torch.Tensor, torch.dtype, int]) -> str | None:
    """Returns the first reason against (name, tensor, dtype, dims), or that this build has no code for the device."""
    for name, tensor, dtype, dims in wanted:
        if reason := refusal(name, tensor, dtype, dims, device):
            return reason
    if capability(device.index) not in build_info()["archs"]:
        return f"this build has no code for {capability(device.index)}"
    return None


def row_stride(tensor: torch.Tensor) -> int:
    """Returns the distance of rows in elements; a single row's stride means nothing and may be anything."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor[0].numel()
