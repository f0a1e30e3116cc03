"""Any function run inside the forward of an FSDP1 module, where that module's weights are whole."""


class _FSDPForwardRedirection:
    """`_FSDPForwardRedirection()(fsdp_module, function, *args)`: `function(*args)` with the module's weights gathered.

    For one call the wrapped module's forward is the function, so all that FSDP does around a forward is done around it.
    """

    def __call__(self, wrapper_module, method, *args, **kwargs):
        wrapped = wrapper_module.module
        own = wrapped.__dict__.get("forward")

        def forward(*args, **kwargs):
            restore()  # the function may call the module's own forward
            return method(*args, **kwargs)

        def restore():
            wrapped.__dict__.pop("forward", None)
            if own is not None:
                wrapped.forward = own

        wrapped.forward = forward
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            if wrapped.__dict__.get("forward") is forward:
                restore()
