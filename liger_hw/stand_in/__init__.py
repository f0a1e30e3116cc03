"""The package `liger_kernel`, made of this library while the process runs."""
