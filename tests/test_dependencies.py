"""Imports point one way, and nothing heavy is imported where it may be missing."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "liger_hw"
FLOORS = [  # from the top: a room may import itself and what stands below it, so not its neighbours either
    {"__main__"},
    {"cli"},
    {"proof"},
    {"bench"},
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
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(ROOT.rglob("*.py"))
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


def room(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def test_every_room_has_a_floor():
    """FLOORS names every file and folder of the package."""
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms == {"__init__", *FLOOR}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    if path == ROOT / "__init__.py":
        assert list(imports(path, True)) == ["liger_hw._lazy.lazy_names"]
        return
    for name in imports(path, everywhere=True):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if first == "liger_hw" and target in FLOOR:
            lower = FLOOR[target] > FLOOR[room(path)]
            assert lower or target == room(path), f"{path} imports {name}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_packages_are_imported_late(path):
    assert not any(name.startswith("unittest") for name in imports(path, everywhere=True)), "mocks are for tests"
    early = {name.split(".")[0] for name in imports(path, everywhere=False)}
    allowed = {"transformers"} if path.relative_to(ROOT).as_posix() in DERIVE_FROM_TRANSFORMERS else set()
    assert not (early & {"transformers", "tokenizers", "matplotlib", "rich", "triton"}) - allowed
