"""Make Triton's interpreter faster, and its NaN that of GPUs, in every process of tests that imports this file."""

from types import SimpleNamespace

from liger_hw._triton import interpreting

if interpreting():
    import numpy
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    # The interpreter patches Triton's language at each launch and at each call of a function inside: half of its time.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)

    # of a NaN and a number GPUs return the number; so do later interpreters than that of Triton 3.6
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)
