"""Swap a module's class for a subclass that computes with an op, and restore it.

Parameters, buffers, hooks and names stay where they are, and no other module changes. A copy of a patched module
computes with the copy's weights; a closure set as its `forward` would compute with the original's.
"""

import abc
import copyreg
import functools
import inspect
import logging
import types
import weakref

from liger_hw._torch import init_abc
from liger_hw.patching.hooks import original_class
from liger_hw.patching.reading import all_code, instructions_of
from liger_hw.patching.rebinding import innermost, share_attributes
from liger_hw.patching.values import TRUSTED, is_known, package

logger = logging.getLogger("liger_hw")
ARMED = "liger_armed_"  # how names of instance attributes of patched classes begin

__all__ = ["is_changed_since", "is_swapped", "original_class", "patched_class", "restore", "swap"]


def swap(module, cls):
    """Give `module` the patched class `cls`, a subclass of its class."""
    object.__setattr__(module, "__class__", cls)  # a class's own `__setattr__` may refuse


def restore(module):
    """Restore the class of a swapped `module`, and remove the patched class's instance attributes.

    Methods of the patched class that a library stores on the instance become those of the module's own class:
    accelerate stores the forward that it wraps.
    """
    patched = type(module)
    object.__setattr__(module, "__class__", patched.liger_original)
    for name, value in list(vars(module).items()):
        if name.startswith(ARMED):
            del vars(module)[name]
        elif isinstance(value, types.MethodType) and vars(patched).get(value.__name__) is value.__func__:
            vars(module)[name] = types.MethodType(getattr(type(module), value.__name__), module)


def is_swapped(module):
    """Tell whether `module` has a class that `swap` gave it."""
    return "liger_original" in vars(type(module))


def swapped_base(cls):
    """Return the class that `swap` gave a module, of which `cls` may derive."""
    return next(base for base in cls.__mro__ if "liger_original" in vars(base))


def is_changed_since(module):
    """Tell whether a parametrization, FSDP or other code derived `module`'s class from a swapped one."""
    return hasattr(type(module), "liger_original") and not is_swapped(module)


class _Unregistered:
    """Base of patched classes, because of which the original's `__init_subclass__` does not see them.

    It is no module: in lists of all modules' subclasses the original comes before the patched class.
    """

    def __init_subclass__(cls, **options):
        if "liger_original" not in vars(cls):
            super().__init_subclass__(**options)


_classes = weakref.WeakKeyDictionary()  # class of a module -> {(match, digest of its code): weak patched class}


def patched_class(original, match):
    """Return the subclass of `original` that computes with `match`'s op.

    There is one for each code of the original, as long as it is in use. It has the original's names, because programs
    choose modules by them; `print` shows `Liger` before the name. It pickles as the original class and the match, and
    unpickles patched where the original's code is the same.
    """
    return _class_for(original, match, match.digest(original))


def _class_for(original, match, digest):
    classes = _classes.setdefault(original, weakref.WeakValueDictionary())
    cls = classes.get((match, digest))
    if cls is None:
        cls = classes[match, digest] = _new_class(original, match, digest)
    return cls


def _new_class(original, match, digest):
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    facts = {"liger_original": original, "liger_match": match, "liger_digest": digest}
    members = {"_get_name": _get_name, "__reduce_ex__": _reduce, "__prepare_scriptable__": _prepare_scriptable}
    unchanged = match.guard(original)
    members |= match.members(original, unchanged)
    if "forward" in members:
        if not hasattr(members["forward"], "__wrapped__"):  # programs read its signature
            functools.update_wrapper(members["forward"], original.forward)
        share_attributes(members["forward"], original.forward)
    # type.__new__ leaves out a metaclass's own __new__ and __init__, which may register classes
    metaclass = _like_its_original(type(original))
    cls = type.__new__(metaclass, original.__name__, (_Unregistered, original), names | facts | members)
    if isinstance(cls, abc.ABCMeta):
        init_abc(cls)  # which ABCMeta does: else the class would share the original's cache of subclasses
        if not isinstance(original, abc.ABCMeta):
            cls.__abstractmethods__ = frozenset()  # an original that is no ABC has instances in spite of them
    unchanged.members.watch(cls)
    return cls


@functools.cache
def _like_its_original(metaclass):
    """Return the class of patched classes, which equal their originals and have their instances.

    Programs look modules up in tables by their class, and compare classes. Only torch.distributed tells the two apart,
    because FSDP2 keeps a subclass of each class in such a table. It derives from ABCMeta, so that a program may derive
    a class from a patched and an abstract one.
    """
    metaclass = abc.ABCMeta if metaclass is type else metaclass

    def equal(cls, other):
        caller = inspect.currentframe().f_back
        tells_apart = caller and caller.f_globals.get("__name__", "").startswith("torch.distributed.")
        return not tells_apart and _unpatched(cls) is _unpatched(other) or metaclass.__eq__(cls, other)

    def by_original(name):
        def method(cls, *others):
            # ABCMeta's method would ask the original's subclasses, and so this one, for ever
            original = _unpatched(cls)
            return getattr(metaclass if original is cls else type, name)(original, *others)

        return method

    names = ("__hash__", "__instancecheck__", "__subclasscheck__")
    members = {"__eq__": equal} | {name: by_original(name) for name in names}
    members |= {"liger_original": metaclass, "__module__": __name__}
    # as below, a metaclass's own class may register or refuse
    like_its_original = type.__new__(type(metaclass), metaclass.__name__, (_Unregistered, metaclass), members)
    copyreg.pickle(like_its_original, _reduce_class)
    return like_its_original


def _unpatched(cls):
    return vars(cls).get("liger_original", cls) if isinstance(cls, type) else cls


DIFFERS_IN_SUBCLASS = {"__dict__", "__mro__", "__bases__", "__base__", "__subclasses__", "mro"}


def reason_against(cls):
    """Return why instances of `cls` cannot have a subclass, or None."""
    if reason := reason_against_metaclass(cls):
        return reason
    for base in cls.__mro__:
        if package(base) not in (*TRUSTED, "peft", "builtins"):
            for name, method in vars(base).items():
                code = getattr(innermost(getattr(method, "__func__", method)), "__code__", None)
                if code and name != "__init__" and _tells_a_subclass(code, isinstance(method, classmethod)):
                    return f"its {name}() does more with the instance's class than read an attribute of it"
    return None


IDENTITY_METHODS = {"__eq__", "__hash__", "__getattr__", "__getattribute__", "__instancecheck__", "__subclasscheck__"}


def reason_against_metaclass(cls):
    """Return why tables of classes and pins would not see what `cls` is, or None."""
    for base in type(cls).__mro__:
        if not is_known(base) and (names := IDENTITY_METHODS & vars(base).keys()):
            return f"the class of its class defines {min(names)}()"
    return None


def _tells_a_subclass(code, takes_class):
    """Tell whether code does more with its instance's class than read an attribute.

    So does code that gives its instance a second name, by which it may read the class.
    """
    first = code.co_varnames[:1]
    for part in all_code(code):
        listed = [i for i in instructions_of(part) if i.opname != "PRECALL"]
        for before, instruction, then, after in zip([listed[0], *listed], listed, listed[1:], listed[2:]):
            if not instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) or instruction.argval not in first:
                continue
            writes = then.opname in ("STORE_ATTR", "DELETE_ATTR", "COPY") or before.argval in ("setattr", "delattr")
            if takes_class and writes or then.opname.startswith("STORE_FAST"):
                return True
            reads = after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval not in DIFFERS_IN_SUBCLASS
            is_class = (before.opname, before.argval) == ("LOAD_GLOBAL", "type") or then.argval == "__class__"
            if is_class and not reads and not after.opname.startswith(("FORMAT", "CONVERT")):
                return True
    return False


def _get_name(self):
    """Return the name that `print` shows."""
    return f"Liger{type(self).__name__}" if is_swapped(self) else type(self).__name__


def _prepare_scriptable(self):
    """Give the module its own class: torch.jit.script, which calls this, reads a class's source."""
    if is_swapped(self):
        _warn_about_script(type(self).__name__)
        restore(self)
    return self


@functools.cache
def _warn_about_script(name):
    logger.warning("torch.jit.script compiles %s as it was before patch, and leaves the module unpatched", name)


def _reduce(self, protocol):
    cls = type(self)
    # a derived class, such as FSDP's, pickles in its own way
    original = cls.liger_original
    if not is_swapped(self):
        return super(swapped_base(cls), self).__reduce_ex__(protocol)
    if registered := copyreg.dispatch_table.get(original):
        return registered(self)
    if (original.__reduce_ex__, original.__reduce__) != (object.__reduce_ex__, object.__reduce__):
        return original.__reduce_ex__(self, protocol)  # the program's own code makes the copy
    _, _, state, *more = original.__reduce_ex__(self, max(protocol, 2))
    if isinstance(state, dict):  # a head is armed while its model's forward runs, its copy is not
        state = {name: value for name, value in state.items() if not name.startswith(ARMED)}
    return _rebuild, (original, cls.liger_match, cls.liger_digest), state, *more


def _reduce_class(cls):
    if "liger_original" not in vars(cls):  # derived from a patched class: pickle looks its name up
        return cls.__qualname__
    return _rebuild_class, (cls.liger_original, cls.liger_match, cls.liger_digest)


def _rebuild(original, match, digest):
    return object.__new__(_rebuild_class(original, match, digest))


def _rebuild_class(original, match, digest):
    """Return the patched class, or the original if its code has changed."""
    cls = _classes.get(original, {}).get((match, digest))
    if cls is None and match.digest(original) == digest:
        cls = _class_for(original, match, digest)
    return cls or original
