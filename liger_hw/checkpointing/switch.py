"""Keep a plan where a program enables activation checkpointing; end it where it disables that."""

import types

METHOD = "_set_gradient_checkpointing"  # of transformers' PreTrainedModel: each of its switches calls it


def watch(models, plans_of):
    """Take the place of the switch of `models`, until `unwatch`.

    Args:
        models: modules; those without the method are left.
        plans_of: a function from a module to the `Activations` of its layers.

    Returns:
        the models with the method.
    """

    def _set_gradient_checkpointing(self, enable=True, *args, **options):
        plans = plans_of(self)
        if not enable:
            for plan in plans:
                plan.undo()
        getattr(type(self), METHOD)(self, enable, *args, **options)
        if enable:
            for plan in plans:
                plan.take_layers()

    watched = [model for model in models if hasattr(type(model), METHOD)]
    for model in watched:
        # as a method, so that a copied or unpickled model has its own
        vars(model)[METHOD] = types.MethodType(_set_gradient_checkpointing, model)
    return watched


def unwatch(models):
    """Give `models` their own switch back."""
    for model in models:
        vars(model).pop(METHOD, None)
