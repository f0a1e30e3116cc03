"""Imports point one way, and nothing heavy is imported where it may be missing."""

import ast
import pathlib

import pytest

CHECKOUT = pathlib.Path(__file__).parent.parent
PRODUCT, LAB = CHECKOUT / "liger_hw", CHECKOUT / "lab" / "liger_lab"
PRODUCT_FLOORS = [  # from the top: a room may import itself and what stands below it, so not its neighbours either
    {"__main__"},
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
    {"models"},
]
FLOORS = {
    wing: {room: number for number, rooms in enumerate(floors) for room in rooms}
    for wing, floors in ((PRODUCT, PRODUCT_FLOORS), (LAB, LAB_FLOORS))
}
FILES = sorted((*PRODUCT.rglob("*.py"), *LAB.rglob("*.py")))
COMMAND = PRODUCT / "__main__.py"  # it starts the laboratory's command
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
