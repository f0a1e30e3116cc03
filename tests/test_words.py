"""Check the plain words of CONTRIBUTING.md in everything that people read."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [file for folder in ("liger_hw", "examples", "lab") for file in sorted((ROOT / folder).rglob("*.py"))]
PACKAGES = [file for file in SOURCES if "examples" not in file.parts]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
RIDDLES = re.compile(
    r"\b(whatever|whichever|whoever|whence|thereof|somebody|the ones? that|comes? with|came with|hands? on|stands? for|"
    r"made again|whose turn|plain's|(gave|gives|return) (its|their) bits|"
    r"what (?!to )\w+ (is|are|was|were|does|do|did))\b",
    re.IGNORECASE,
)
NO_IMPERATIVE = re.compile(
    r"(A|All|An|As|At|Each|Every|For|How|If|In|Its|No|None|Of|One|Or|So|Some|The|Their|What|When|Where|Whether|Which|Why)\b"
)
WORDS = 15


def docstrings(tree):
    """Yield every documented node of `tree` with its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield node, text


def faults(source: str) -> list[str]:
    """List the broken rules of a Python file, with line numbers."""
    lines, tree = [], ast.parse(source)
    for node, text in docstrings(tree):
        first, place = text.splitlines()[0], f"line {getattr(node, 'lineno', 1)}"
        if len(first.split()) > WORDS:
            lines.append(f"{place}: the docstring's first line has more than {WORDS} words: {first}")
        if not first.endswith("."):
            lines.append(f"{place}: the docstring's first line does not end with a period: {first}")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and NO_IMPERATIVE.match(first):
            lines.append(f"{place}: the docstring's first line is no imperative: {first}")
    texts = [(node.lineno, node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts += [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return lines + [
        f"line {line}: {riddle[0]!r} in: {text[:100]!r}"
        for line, text in texts
        if isinstance(text, str) and (riddle := RIDDLES.search(text))
    ]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sources(file):
    assert not faults(file.read_text())


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_pages(file):
    riddles = [f"line {i}: {match[0]!r}" for i, line in enumerate(file.read_text().splitlines(), 1)
               for match in RIDDLES.finditer(line)]  # fmt: skip
    assert not riddles


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_and_file_names(file):
    text = file.read_text()
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for name in re.findall(r"`((?:liger_hw|tests|docs|lab|examples)/[\w/.-]*)`", text):
        example = "sigmoid_gate" in name  # the op that CONTRIBUTING.md adds
        assert example or (ROOT / name).exists(), name
    files = {path.name for room in ("liger_hw", "tests", "examples", "lab") for path in (ROOT / room).rglob("*.py")}
    for name in re.findall(r"`(\w+\.py)`", text):
        assert name in files, name


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_blocks_of_code_end_with_an_empty_line(file):
    """Text that is wrapped anew joins the lines of a block to each other and to the text."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = re.findall(r"^\n    (?![-*] |\d+\. ).*\n(?:    .*\n)*(?=\S).*", text, re.MULTILINE)
    assert not broken


UNCLEAR = re.compile(
    r"^_?of_|_of_|(^|_)(there|theirs|own|alike|found|made|wanted|terms|outcome|whose)(_|$)", re.IGNORECASE
)
TERMS = {  # of mathematics and of hardware, and public names
    "power_of_2", "power_of_2_below", "waves_of_32", "waves_of_64", "policy_loss_of_logits",
    "divergence_of_logits", "cosine_of_logits", "kl_of_probabilities",  # kernels, by which entries of tables are named
    "divergence_of_logits_config", "cosine_of_logits_config", "kl_of_probabilities_config",
}  # fmt: skip


def room_of(file):
    """Return (package, room) of a source file."""
    package, *rest = file.relative_to(ROOT / "lab" if file.is_relative_to(ROOT / "lab") else ROOT).parts
    return package, rest[0].removesuffix(".py") if rest else ""


def is_kernel(node):
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(line) for line in node.decorator_list)


def new_names(tree):
    """Yield (line, name) of everything that a file names itself, functions, classes, arguments and variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def unclear_names(source):
    """List the names that hide what their values are, with line numbers."""
    names = new_names(ast.parse(source))
    return [f"line {line}: {name}" for line, name in names if UNCLEAR.search(name) and name.strip("_") not in TERMS]


@pytest.mark.parametrize("file", PACKAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_names_say_what_a_value_is(file):
    """`of_row` and `made` say nothing; `row_weights` and `producers` do."""
    assert not unclear_names(file.read_text())
    assert not UNCLEAR.search(file.stem)


LINES = 60


@pytest.mark.parametrize(
    "file", [file for file in SOURCES if room_of(file)[0] == "liger_hw"], ids=lambda file: str(file.relative_to(ROOT))
)
def test_functions_are_short(file):
    """Without its docstring; a kernel is one function, however long."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and not is_kernel(node):
            docstring = node.body[0] if ast.get_docstring(node) else None
            lines = node.end_lineno - node.lineno + 1
            lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert lines <= LINES, f"{node.name}: give its checks or halves to helpers"


SHARED_CLASS_NAMES = {"Access"}  # rename it, and add none


def test_a_class_name_has_one_meaning():
    """One name for one thing: a second class of a name makes every search for it a question."""
    classes = {}
    for file in PACKAGES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name for name, files in classes.items() if len(files) > 1} <= SHARED_CLASS_NAMES


EVERY_ROOM = {"NAMES", "LN_2", "LOG2_E"}  # tables of lazy packages; numbers of kernels, which Python needs, too


def constants(file):
    """Yield (name, value) of the constants that a file defines by itself."""
    for node in ast.parse(file.read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith(("_", "PROBE_")):
                yield target.id, ast.unparse(node.value)


def test_a_constant_has_one_meaning():
    """But for the vendors' tables, which have the same names, and sizes of probes."""
    values = {}
    for file in PACKAGES:
        if room_of(file)[0] == "liger_hw" and room_of(file)[1] != "backends":
            for name, value in constants(file):
                values.setdefault(name, set()).add(value)
    assert {name for name, meanings in values.items() if len(meanings) > 1} <= EVERY_ROOM


def test_the_check_sees_every_fault():
    source = '''
def f():
    """What comes of it, for whatever reason, and
    more."""
    raise ValueError("somebody did it")  # the one that
'''
    assert len(faults(source)) == 5  # no period, no imperative, three riddles


def test_the_check_sees_every_unclear_name():
    source = """
import x as of_x
class Theirs: pass
def rows_of_it(own_rows, rows):
    self.made = there = power_of_2 = 1
"""
    assert len(unclear_names(source)) == 6
