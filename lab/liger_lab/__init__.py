"""The laboratory of liger_hw: prove, measure, tune and publish from outside the package.

The package never imports it. `pip install 'liger_hw[lab]'` brings it, and the commands of `liger-hw` with it.
"""
