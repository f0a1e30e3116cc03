"""Modules whose options are attributes."""

from torch import nn


class OptionsModule(nn.Module):
    """Keep a constructor's arguments as attributes, and pass them on by name.

    Args:
        arguments: `locals()` of the constructor.
    """

    def __init__(self, arguments: dict):
        super().__init__()
        self._options = [name for name in arguments if name not in ("self", "__class__")]
        for name in self._options:
            setattr(self, name, arguments[name])

    @property
    def options(self) -> dict:
        """Return the options by name, with the attributes' values of now."""
        return {name: getattr(self, name) for name in self._options}
