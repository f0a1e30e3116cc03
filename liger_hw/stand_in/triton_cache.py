"""Define the names of `liger_kernel.triton`."""


def apply_liger_triton_cache_manager():
    """Do nothing: supported Tritons have no race between processes to work around."""
