"""Serve the package `liger_kernel` from this library while the process runs."""
