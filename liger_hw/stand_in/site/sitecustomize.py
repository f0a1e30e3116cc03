"""Install the stand-in in every Python that `python -m liger_hw.run` starts."""

import pathlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

HERE = str(pathlib.Path(__file__).parent)


def run_the_one_hidden_by_this():
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != HERE])
    if spec is not None:
        spec.loader.exec_module(module_from_spec(spec))


def install_stand_in():
    try:
        from liger_hw.stand_in.finder import install
    except ModuleNotFoundError as error:
        if error.name != "liger_hw":
            raise
        return  # a Python of another environment
    install(replace=True)  # PYTHONPATH contains this folder only on request


run_the_one_hidden_by_this()
install_stand_in()
