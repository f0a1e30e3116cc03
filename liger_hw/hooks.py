"""Hold functions that replace launches or `raw` functions, or follow parity checks.

`hooks` is the one object that holds them. Context managers set a hook and put the one before it back, also after an
error. Plain attributes, no ContextVar: autograd runs backward on threads that inherit no context.
"""

from contextlib import contextmanager


class Hooks:
    """The hooks of this process; None where nothing is hooked.

    Attributes:
        launch: called as (kernel, grid, config, *args) in place of every launch.
        observer: called as (function, args, repeatable) in place of every `raw` function. `function` may run again
            if `repeatable`: it writes to none of its arguments.
        check_observer: called as (op, inputs, backend, error) after every parity check; `error` is None or what failed.
    """

    def __init__(self):
        self.launch = self.observer = self.check_observer = None
        self._collected = []  # one list for each `collect_kernels` that is active

    def replace_launches(self, launch):
        """Call `launch(kernel, grid, config, *args)` within, and launch nothing: to describe, or only to compile."""
        return self._within("launch", launch)

    def observe(self, observer):
        """Call `observer(function, args, repeatable)` within, in place of every `raw` function."""
        return self._within("observer", observer)

    def observe_always(self, observer) -> None:
        """Observe every `raw` function from now on, outside of every `observe`; None ends that."""
        self.observer = observer

    def observe_checks(self, observer):
        """Call `observer(op, inputs, backend, error)` within, after every parity check."""
        return self._within("check_observer", observer)

    @contextmanager
    def collect_kernels(self):
        """Yield a list of the Triton kernels whose first launch is within the block."""
        kernels = []
        self._collected.append(kernels)
        try:
            yield kernels
        finally:
            self._collected = [others for others in self._collected if others is not kernels]

    def add_kernel(self, kernel) -> None:
        """Add a compiled kernel to the list of every active `collect_kernels`."""
        for kernels in self._collected:
            kernels.append(kernel)

    @contextmanager
    def _within(self, name, function):
        before = getattr(self, name)
        setattr(self, name, function)
        try:
            yield
        finally:
            setattr(self, name, before)


hooks = Hooks()
