from liger_hw.backends import use_backend

__all__ = ["use_backend"]
