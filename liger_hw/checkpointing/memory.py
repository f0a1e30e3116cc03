"""Count the memory of a device."""

import torch


class DeviceMemory:
    """Count a device's memory.

    A CPU counts nothing; there the budget bounds the bytes that layers keep.

    Attributes:
        counts: whether the device counts.
    """

    def __init__(self, device):
        self.device, self.counts = device, device.type != "cpu"

    def allocated(self):
        """Return the bytes that tensors take now."""
        return torch.accelerator.memory_allocated(self.device) if self.counts else 0

    def peak(self):
        """Return the peak of allocated bytes since the last call."""
        if not self.counts:
            return 0
        peak = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return peak

    def failures(self):
        """Return how often an allocation found no memory."""
        return torch.accelerator.memory_stats(self.device).get("num_ooms", 0) if self.counts else 0

    def available(self):
        """Return the bytes that this process has or can get."""
        return torch.accelerator.get_memory_info(self.device)[0] + torch.accelerator.memory_reserved(self.device)

    def total(self):
        """Return the bytes of the device."""
        return torch.accelerator.get_memory_info(self.device)[1]
