"""What the package shows, what importing it costs, and which part may import which."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import semspec_local
from semspec_local import errors

PACKAGE = Path(semspec_local.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

SURFACE = {
    *("Reasoner", "Sources", "RunResult", "Speculation"),
    *("RunConfig", "ModelConfig", "SamplingConfig"),
    *("StepRecord", "RunTrace", "read_trace"),
    *("POLICIES", "make_policy"),
    "__version__",
}

# -- the surface ------------------------------------------------------------------------------------


def test_the_public_names_are_these_and_no_others():
    error_classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(semspec_local.__all__) == SURFACE | error_classes
    assert len(semspec_local.__all__) == len(set(semspec_local.__all__))


@pytest.mark.parametrize("name", semspec_local.__all__)
def test_a_public_name_is_there_and_documented(name):
    value = getattr(semspec_local, name)
    assert value is getattr(semspec_local, name)
    assert name in dir(semspec_local)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__.startswith("semspec_local.") and inspect.getdoc(value)


def test_type_checkers_see_the_names_that_run_time_finds():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        node.module: tuple(name.name for name in node.names) for node in block.body if isinstance(node, ast.ImportFrom)
    }
    assert seen == semspec_local._HOMES
    assert {name for names in seen.values() for name in names} | {"__version__"} == set(semspec_local.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Reasonner'"):
        semspec_local.Reasonner  # noqa: B018


def test_the_version_is_that_of_the_installed_package():
    assert semspec_local.__version__ == metadata.version("semspec-local")


def test_types_are_published():
    assert (PACKAGE / "py.typed").is_file()


# -- what an import costs ---------------------------------------------------------------------------

HEAVY = {
    *("greenlet", "ray", "llama_cpp", "gguf", "jinja2", "onnxruntime", "onnx", "rich"),
    *("matplotlib", "torch", "scipy", "tokenizers", "safetensors", "huggingface_hub", "math_verify", "sympy"),
}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a new Python has loaded after running `code`."""
    ask = "\nimport sys; sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code + ask], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_by("import semspec_local; dir(semspec_local)") & (HEAVY | {"numpy", "click"})


def test_importing_every_public_name_loads_no_model_library():
    assert not loaded_by("from semspec_local import *") & HEAVY


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["bench", "--help"], ["doctor", "--help"], ["policies"]]
)
def test_help_loads_no_model_library(arguments):
    code = f"from semspec_local.cli import _run\nassert _run({arguments!r}) == 0"
    assert not loaded_by(code) & HEAVY


# -- which part may import which --------------------------------------------------------------------

ALLOWED = {
    "llama_cpp": ["llama/"],
    "onnxruntime": ["probes/"],
    "onnx": ["probes/adopt.py", "probes/write.py"],
    "torch": ["lab/tiny/llama.py", "lab/tiny/train.py", "lab/train.py"],
    "math_verify": ["bench/verify_worker.py"],
    "sympy": [],
    "matplotlib": ["lab/charts.py"],
    "ray": ["jobs/ray_engine.py"],
    "scipy": ["lab/"],
    "tokenizers": ["lab/"],
    "safetensors": ["lab/", "probes/weightfile.py"],
    "skops": ["probes/weightfile.py"],
    "greenlet": ["llama/hub.py"],
    "jinja2": ["llama/chat.py"],
    "huggingface_hub": ["pairs/hub.py"],
    "click": ["cli/"],
}
"""Where each library of weight may be imported; everywhere else it is a mistake."""

LAYERS = [
    {"errors", "resources", "answer", "answer_forms", "questions", "roles", "interrupts"},
    {"config", "modelinfo", "provenance"},
    {"machine"},
    {"steps"},
    {"protocols"},
    {"policy", "bridge", "prefix", "rating"},
    {"metrics", "features"},
    {"trace"},
    {"waiting", "candidate", "linefile"},
    {"engine", "testing"},
    {"remarks"},
    {"result"},
    {"llama", "probes"},
    {"pairs", "prompting"},
    {"reasoner"},
    {"lab"},
    {"costs"},
    {"jobs", "bench", "serve"},
    {"doctor"},
    {"cli"},
]
"""From the bottom up: a part imports from lower layers only, or from itself. One that is not here stands below cli."""

# The engine knows models and probes through protocols; the two folders that implement these know nothing of it.
NEVER = {
    "engine": {"llama", "probes", "pairs", "provenance"},
    "llama": {"probes", "engine", "policy", "trace"},
    "probes": {"llama", "engine", "policy", "trace"},
}


def imports(path: Path) -> list[tuple[str, str]]:
    """What a module imports when it runs, anywhere in it: (`own`, a part of this package) or (`other`, a library)."""
    package = ("semspec_local", *path.relative_to(PACKAGE).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names += [module] if module.count(".") else [f"{module}.{alias.name}" for alias in node.names]
    found = []
    for name in names:
        top, _, rest = name.partition(".")
        found.append(("own", rest.partition(".")[0]) if top == "semspec_local" else ("other", top))
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def height(part: str) -> int:
    return next((i for i, layer in enumerate(LAYERS) if part in layer), len(LAYERS) - 2)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    known = {part_of(module) for module in MODULES}
    for kind, name in imports(path):
        if kind == "own" and name in known and name != part:
            assert name not in NEVER.get(part, set()), f"{part} imports {name}"
            assert height(name) < height(part), f"{part} imports {name}, which does not stand below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_library_stays_in_its_folder(path):
    place = path.relative_to(PACKAGE).as_posix()
    for kind, name in imports(path):
        if kind == "other" and name in ALLOWED:
            assert place.startswith(tuple(ALLOWED[name])), f"{place} imports {name}; only {ALLOWED[name]} may"


def test_the_rules_above_are_about_parts_that_exist():
    found = {part_of(path) for path in MODULES}
    assert {"llama", "probes", "engine", "policy", "steps", "trace", "metrics"} <= found
    assert ("other", "llama_cpp") in imports(PACKAGE / "llama" / "native.py")
    assert ("own", "policy") in imports(PACKAGE / "engine.py")


def test_the_design_page_names_every_module_in_its_folder():
    page = PACKAGE.parent / "docs" / "design.md"
    if not page.is_file():
        pytest.skip("not a checkout")
    _, _, tree = page.read_text(encoding="utf-8").partition("\nsemspec_local/\n")
    folders: list[str] = []
    named = set()
    for line in tree.partition("\nmodels/ ")[0].splitlines():
        word, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2 - 1
        del folders[depth:]
        if word.endswith("/"):
            folders.append(word)
        else:
            named.add("".join([*folders, word]))
    there = {path.relative_to(PACKAGE).as_posix() for path in MODULES}
    assert named == {name for name in there if not name.endswith("/__init__.py")}
