"""The engine under `liger_hw.patch`: recognise the parts of a model, prove them, swap their classes."""
