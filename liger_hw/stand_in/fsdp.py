"""Run a function inside the forward of an FSDP1 module, with its weights gathered."""


class _FSDPForwardRedirection:
    """Callable (fsdp_module, function, *args): `function(*args)` with the module's weights gathered.

    For one call it sets the function as the wrapped module's forward, so FSDP gathers and frees weights around it.
    """

    def __call__(self, wrapper_module, method, *args, **kwargs):
        wrapped = wrapper_module.module
        instance_forward = wrapped.__dict__.get("forward")

        def forward(*args, **kwargs):
            restore()  # the function may call the module's own forward
            return method(*args, **kwargs)

        def restore():
            wrapped.__dict__.pop("forward", None)
            if instance_forward is not None:
                wrapped.forward = instance_forward

        wrapped.forward = forward
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            if wrapped.__dict__.get("forward") is forward:
                restore()
