"""The built wheel, installed where the checkout cannot be seen: it is whole, and it runs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

from semspec_local.pairs import PairManifest, is_embedded
from semspec_local.pairs.manifest import LocalFile, read_manifest
from semspec_local.roles import ROLES

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("hatchling") is None, reason="building a wheel needs hatchling: pip install '.[test]'"
    ),
    pytest.mark.skipif(find_spec("pip") is None, reason="building a wheel needs pip, and this environment has none"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    layout = "nt" if sys.platform == "win32" else "posix_prefix"
    programs, packages = (Path(sysconfig.get_path(kind, layout, scheme)) for kind in ("scripts", "purelib"))
    ours = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    # Lines of a .pth are added to the path as they are: the .pth files in there, such as the checkout's, are not read.
    (packages / "dependencies.pth").write_text("\n".join(sorted(ours)) + "\n")
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return programs


def printed(program: Path, *arguments: str, cwd: Path) -> str:
    done = subprocess.run([str(program), *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def in_checkout(*folders: str) -> set[str]:
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files}


def embedded_pairs() -> list[PairManifest]:
    """The pairs whose files are in the checkout, beside their manifests."""
    return [
        manifest for manifest in map(read_manifest, sorted((ROOT / "models").glob("*.toml"))) if is_embedded(manifest)
    ]


def test_manifests_and_probes_are_in_it_and_nothing_else_of_the_checkout(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {name.removeprefix("semspec_local/_data/") for name in names if name.startswith("semspec_local/_data/")}
    assert data == in_checkout("models", "probes")
    assert "semspec_local/_data/models/qwen2.5-coder.toml" in names and "semspec_local/py.typed" in names
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"semspec_local"}


def test_a_file_that_a_shipped_manifest_names_by_its_path_is_in_it_too(wheel):
    archive = zipfile.ZipFile(wheel)
    for manifest in embedded_pairs():
        for role in ROLES:
            model_file = manifest.role(role)
            assert isinstance(model_file.source, LocalFile)
            place = model_file.source.path.relative_to(ROOT)
            data = archive.read(f"semspec_local/_data/{place.as_posix()}")
            assert (len(data), hashlib.sha256(data).hexdigest()) == (model_file.size, model_file.sha256)


def test_the_source_archive_has_the_models_and_probes_too(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names if name.startswith(("models/", "probes/"))} == in_checkout("models", "probes")
    assert {"LICENSE", "pyproject.toml", "scripts/demo", "semspec_local/py.typed"} <= names


def test_what_it_requires_is_what_runs_it(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    facts = Parser().parsestr(archive.read(name).decode())
    required = [line for line in facts.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert any(line.startswith("llama-cpp-python==") for line in required)
    heavy = ("torch", "scipy", "onnx>", "tokenizers", "safetensors", "transformers", "huggingface")
    assert not [line for line in required if line.startswith(heavy)]
    assert facts["License-Expression"] == "MIT" and facts["Requires-Python"]
    assert "METADATA" in name and any("licenses/LICENSE" in entry for entry in archive.namelist())


def test_installed_it_is_not_the_checkout(bin_folder, tmp_path):
    where = printed(bin_folder / "python", "-c", "import semspec_local as s; print(s.__file__)", cwd=tmp_path)
    assert bin_folder.parent in Path(where.strip()).parents


def test_installed_it_says_its_version(bin_folder, tmp_path):
    version = printed(bin_folder / "semspec-local", "--version", cwd=tmp_path).split()[-1]
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert printed(bin_folder / "python", "-m", "semspec_local", "--version", cwd=tmp_path).split()[-1] == version


def test_installed_it_knows_the_shipped_pair_and_the_policies(bin_folder, tmp_path):
    pairs = json.loads(printed(bin_folder / "semspec-local", "models", "list", "--json", cwd=tmp_path))
    (real,) = (pair for pair in pairs if pair["name"] == "qwen2.5-coder")
    assert real["default"] and bin_folder.parent in Path(real["manifest"]).parents
    assert "semantic-ratio" in printed(bin_folder / "semspec-local", "policies", cwd=tmp_path)


def test_installed_it_has_the_embedded_pair(bin_folder, tmp_path):
    program = bin_folder / "semspec-local"
    for manifest in embedded_pairs():
        paths = printed(program, "models", "path", manifest.name, cwd=tmp_path).splitlines()
        assert len(paths) == 2 and all(bin_folder.parent in Path(path).parents for path in paths)
        result = json.loads(printed(program, "run", "How many?", "-q", "--json", "-n", "40", "-t", "1", cwd=tmp_path))
        assert result["usage"]["completion_tokens"] > 0


def test_installed_it_reasons(bin_folder, tiny, tmp_path):
    options = ["-m", str(tiny("llama")), "-md", str(tiny("llama-other-seed")), "--policy", "loglik-ratio", "-n", "20"]
    result = json.loads(
        printed(bin_folder / "semspec-local", "run", "hi", *options, "-q", "--json", "-t", "1", cwd=tmp_path)
    )
    assert result["usage"]["completion_tokens"] > 0
