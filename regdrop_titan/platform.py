"""What TorchTitan 0.2.2 lacks to run on CPU with gloo, and where it guesses a device's speed.

`prepare()` runs when `regdrop_titan` is imported, before TorchTitan is: its modules fix the device on import.
"""

import importlib
import os
import platform
import resource
import sys
import warnings
from types import ModuleType, SimpleNamespace

import torch
import torch._inductor.config


class CPUDeviceModule(ModuleType):
    """`torch.cpu`, with the calls that TorchTitan's memory monitor and trainer make of a device module.

    Memory is that of the process (resident set), in bytes.
    """

    def __init__(self) -> None:
        super().__init__("regdrop_titan.platform.cpu")

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def set_device(self, device) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def synchronize(self, device=None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, device=None) -> str:
        return f"CPU ({platform.machine()})"

    def get_device_properties(self, device=None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def reset_peak_memory_stats(self, device=None) -> None:
        pass  # the kernel keeps one peak a process; it cannot be reset

    def memory_stats(self, device=None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def has_accelerator() -> bool:
    """Whether torch sees a device other than the CPU."""
    return torch._utils._get_available_device_type() is not None


def _peak_flops_or_nan(upstream):
    """TorchTitan takes an A100's peak for a device it does not know; an unknown device has no MFU."""

    def get_peak_flops(device_name: str) -> float:
        if device_name.startswith("CPU"):
            return float("nan")
        peak = upstream(device_name)
        a100_by_default = peak == 312e12 and "A100" not in device_name
        return float("nan") if a100_by_default else peak

    return get_peak_flops


def prepare() -> None:
    """Import TorchTitan with the CPU as its device where there is no accelerator.

    Raises ImportError when TorchTitan was imported before, with the device fixed to CUDA.
    """
    if has_accelerator():
        titan_utils = importlib.import_module("torchtitan.tools.utils")
    else:
        if "torchtitan" in sys.modules:
            raise ImportError("import regdrop_titan before torchtitan: TorchTitan fixes its device on import")
        for message in ("DTensor random operators may not", "DTensor manual_seed", "Set timeout is now only"):
            warnings.filterwarnings("ignore", message=message)  # true and without consequence here
        warnings.filterwarnings("ignore", message="In CPU autocast")  # of fp32, which the trainer then switches off
        # TorchTitan asks torch for the device type once, on import, and takes "cuda" for an answer of None
        ask_type, ask_module = torch._utils._get_available_device_type, torch._utils._get_device_module
        torch._utils._get_available_device_type = lambda: "cpu"
        torch._utils._get_device_module = lambda device_type: CPUDeviceModule()  # type: ignore[assignment]
        try:
            titan_utils = importlib.import_module("torchtitan.tools.utils")
        finally:
            torch._utils._get_available_device_type = ask_type
            torch._utils._get_device_module = ask_module
        # On CPU the compiler's own generator is several times slower than torch's, and would draw other masks
        torch._inductor.config.fallback_random = True
    titan_utils.get_peak_flops = _peak_flops_or_nan(titan_utils.get_peak_flops)  # type: ignore[attr-defined]
