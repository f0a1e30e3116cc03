"""Triton, or a substitute where it is not installed (macOS, Windows, CPU-only installs).

With the substitute, kernel files still import: their decorators do nothing, and only the references can run.
"""

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":  # such as numpy, which Triton imports under TRITON_INTERPRET=1
        raise ModuleNotFoundError(
            f"Triton is installed, but its import needs the package {error.name}: pip install {error.name}",
            name=error.name,
        ) from error

    class _Missing:
        def __getattr__(self, name):
            if name == "__wrapped__":  # by which Python looks for a function within another
                raise AttributeError(name)
            return self

        def __call__(self, *args, **kwargs):
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Missing()
    AVAILABLE = False
else:
    AVAILABLE = True


@triton.jit
def _probe():
    pass


_INTERPRETING = AVAILABLE and not isinstance(_probe, triton.runtime.JITFunction)


def interpreting() -> bool:
    """Tell whether Triton's interpreter runs kernels on the CPU: TRITON_INTERPRET=1 was set before the import."""
    return _INTERPRETING  # torch.compile of torch 2.11 cannot trace how it is found out
