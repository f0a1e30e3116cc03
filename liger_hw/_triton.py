"""Triton, or a stand-in where there is none.

Where Triton is absent (macOS, Windows, CPU-only installs) kernel files still import: their decorators become no-ops and
only the reference bodies can run.
"""

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:

    class _Missing:
        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return args[0] if args and callable(args[0]) else self

    triton = tl = _Missing()
    AVAILABLE = False
else:
    AVAILABLE = True


def interpreting() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter (TRITON_INTERPRET=1 before the import)."""
    return AVAILABLE and not isinstance(_probe, triton.runtime.JITFunction)


@triton.jit
def _probe():
    pass
