"""The package `liger_kernel`, served by this library while the process runs."""
