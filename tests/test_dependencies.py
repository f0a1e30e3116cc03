"""Imports point one way, and nothing heavy is imported where it may be missing."""

import ast
import pathlib

import pytest

CHECKOUT = pathlib.Path(__file__).parent.parent
PRODUCT, LAB = CHECKOUT / "liger_hw", CHECKOUT / "lab" / "liger_lab"
PRODUCT_FLOORS = [  # from the top: a room may import itself and what stands below it, so not its neighbours either
    {"__main__"},
    {"cli"},
    {"run"},
    {"integrations"},
    {"stand_in"},
    {"transformers"},
    {"chunked_loss"},
    {"testing"},
    {"patching"},
    {"losses"},
    {"kernels"},
    {"launch"},
    {"shortcut"},
    {"dispatch"},
    {"sharding"},
    {"inlining"},
    {"checkpointing"},
    {"tuning"},
    {"checks"},
    {"backends"},
    {"_triton", "_torch", "_lazy", "console", "hooks", "spelling"},
]
LAB_FLOORS = [  # each may import the whole product
    {"tools"},
    {"cli"},
    {"levels"},
    {"bench"},
    {"cases", "contribution"},
    {"models", "terminal"},
]
FLOORS = {
    wing: {room: number for number, rooms in enumerate(floors) for room in rooms}
    for wing, floors in ((PRODUCT, PRODUCT_FLOORS), (LAB, LAB_FLOORS))
}
FILES = sorted((*PRODUCT.rglob("*.py"), *LAB.rglob("*.py")))
COMMAND = PRODUCT / "cli" / "__init__.py"  # it adds the laboratory's commands to its own
DERIVE_FROM_TRANSFORMERS = {  # are classes of it, and are imported when they are asked for
    "integrations/trainer_callback.py", "transformers/auto_model.py", "patching/output_classes.py",
}  # fmt: skip


def imports(path, everywhere):
    """Yield the modules that a file imports, anywhere or at its top level alone."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wing_of(path):
    return PRODUCT if path.is_relative_to(PRODUCT) else LAB


def room(path):
    return path.relative_to(wing_of(path)).with_suffix("").parts[0]


def name_of(path):
    return str(path.relative_to(wing_of(path).parent))


@pytest.mark.parametrize("wing", FLOORS, ids=lambda wing: wing.name)
def test_every_room_has_a_floor(wing):
    """The floors name every file and folder of the package."""
    rooms = {path.stem for path in wing.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms == {"__init__", *FLOORS[wing]}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    wing = wing_of(path)
    if path == PRODUCT / "__init__.py":
        assert list(imports(path, True)) == ["liger_hw._lazy.lazy_names"]
        return
    for name in imports(path, everywhere=True):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if first == wing.name and target in FLOORS[wing]:
            lower = FLOORS[wing][target] > FLOORS[wing][room(path)]
            assert lower or target == room(path), f"{path} imports {name}, which is not below it"
        if first == LAB.name:
            assert wing == LAB or path == COMMAND, f"{path} imports {name}: the product never imports the laboratory"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_optional_packages_are_imported_late(path):
    assert not any(name.startswith("unittest") for name in imports(path, everywhere=True)), "mocks are for tests"
    if room(path) == "tools" and wing_of(path) == LAB:  # programs, which nothing imports
        return
    early = {name.split(".")[0] for name in imports(path, everywhere=False)}
    allowed = {"transformers"} if name_of(path).removeprefix("liger_hw/") in DERIVE_FROM_TRANSFORMERS else set()
    assert not (early & {"transformers", "tokenizers", "matplotlib", "rich", "triton"}) - allowed


TORCH_NAMES = PRODUCT / "_torch.py"
OTHER_NAMES = {  # private names that files outside `_torch.py` read of something else than `self`
    "the product": {"_forced", "_fused"},
    "nn.Module, whose registries `_torch.py` explains": {"_parameters", "_buffers", "_modules"},
    "typing.NamedTuple": {"_asdict", "_fields", "_make", "_replace"},
    "Triton": {"_init_handles"},
    "transformers": {
        "_apply_gate", "_experts_implementation", "_from_config", "_gradient_checkpointing_func", "_is_expert_parallel",
        "_is_package_available", "_liger_kernel_available",
    },
    "kernels": {"_kernel_funcs", "_kernels_enabled"},
}  # fmt: skip


def private_names(tree):
    """Yield (line, name) of private names of torch's modules, and of attributes of anything but `self` and `cls`."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [*node.module.split("."), *(alias.name for alias in node.names)] if "torch" in node.module else []
            names = [] if node.module.startswith("liger_hw") else names
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            names = [] if " " in node.value else node.value.split(".")
        yield from ((node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__"))


@pytest.mark.parametrize("path", sorted({*PRODUCT.rglob("*.py")} - {TORCH_NAMES}), ids=name_of)
def test_private_names_of_torch_are_in_one_file(path):
    allowed = set().union(*OTHER_NAMES.values())
    found = [(line, name) for line, name in private_names(ast.parse(path.read_text())) if name not in allowed]
    assert not found, f"move them into {TORCH_NAMES.name} under a name that says what they do"


def test_the_check_sees_every_private_name():
    source = """
import torch._dynamo
from torch._C import x
from torch.nn.modules.module import _hooks
x._version, torch._grouped_mm, self._mine, hasattr(x, "_schema"), "torch._functorch.config"
"""
    names = [name for _, name in private_names(ast.parse(source))]
    assert sorted(names) == ["_C", "_dynamo", "_functorch", "_grouped_mm", "_hooks", "_schema", "_version"]


def test_no_program_takes_a_build_of_torch_for_a_gpu():
    """A build for CUDA has an accelerator on every machine, and `check_available=True` says whether it is there."""
    for path in (*FILES, *(CHECKOUT / "examples").glob("*.py"), *(CHECKOUT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "current_accelerator":
                assert node.keywords, f"{path}:{node.lineno}: pass check_available=True"
