"""llama.cpp, its bindings, and ONNX Runtime: are they there, whole, and made for this machine?"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from .check import Verdict, fail, ok, warn
from .child import Answer
from .examination import Examination

_CPU_FLAGS = {
    "AVX": "avx",
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "BMI2": "bmi2",
    "F16C": "f16c",
    "FMA": "fma",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
"""llama.cpp's names of what it was built with, and the kernel's names of the same."""


def llama_cpp(examination: Examination) -> Verdict:
    """The bindings can be imported, are the version that this program is made for, and the ones that were installed."""
    answer = examination.answer("llama")
    wanted, installed = _wanted_version(), _installed()
    package = "llama-cpp-python" + (f"=={wanted}" if wanted else "")
    assert answer is not None, "it is always asked for"
    if not answer.ok:
        return _no_import(answer, package, installed is not None)
    version, file = answer.value["version"], Path(answer.value["file"])
    here = f"llama-cpp-python {version} in {file.parent}"
    if installed is None or not _same(Path(str(installed.locate_file("llama_cpp/__init__.py"))), file):
        return warn(
            f"{here} is not the installed package; a folder named llama_cpp stands before it",
            f"start from another folder, look at PYTHONPATH, or install it: pip install {package}",
        )
    if not _is_upstream(installed):
        return warn(f"{here} is a fork, whose functions may differ", f"pip install --force-reinstall {package}")
    if wanted is not None and version != wanted:
        return warn(f"{here}; wanted {wanted}, whose structures this program knows", f"pip install {package}")
    return ok(here)


def _no_import(answer: Answer, package: str, is_installed: bool) -> Verdict:
    reinstall = f"pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python {package}"
    if answer.kind == "ModuleNotFoundError" and not is_installed:
        return fail(f"llama_cpp is not installed ({answer.error})", f"pip install {package}")
    if answer.kind == "signal" and "SIGILL" in (answer.error or ""):
        return fail(
            f"importing llama_cpp: {answer.error}; it was built for another processor", f"build it here: {reinstall}"
        )
    if answer.kind == "timeout":
        return fail(f"importing llama_cpp: {answer.error}", "try again when the machine and its disk are less busy")
    if re.search(r"libcud|libcublas|nvcuda", answer.error or ""):
        return fail(
            f"importing llama_cpp: {answer.error}", f"install that CUDA runtime, or build without CUDA: {reinstall}"
        )
    return fail(f"importing llama_cpp: {answer.error}", f"build it anew: {reinstall}")


def build(examination: Examination, root: Path = Path("/")) -> Verdict | None:
    """llama.cpp was built for this processor, and for a GPU where layers are to go there."""
    answer = examination.answer("build")
    if answer is None or not examination.answers["llama"].ok:
        return None
    if not answer.ok:
        return fail(f"llama.cpp does not say how it was built: {answer.error}", "install it anew (see llama-cpp)")
    features, gpu = set(answer.value["features"]), answer.value["gpu"]
    layers = (examination.models.n_gpu_layers, examination.models.n_gpu_layers_draft)
    said = f"{' '.join(sorted(features))}; GPU: {'yes' if gpu else 'no'}, mmap: {_yes(answer.value['mmap'])}"
    if any(layers) and not gpu:
        return fail(
            f"{said}; -ngl puts layers on a GPU, and this build ignores that",
            "leave out -ngl and -ngld, or build with a GPU backend (CMAKE_ARGS=-DGGML_CUDA=on)",
        )
    flags = _cpu_flags(root)
    if flags is None:
        return ok(f"{said}; the processor's own flags are not known here")
    rebuild = "build it on this machine: pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
    rebuild += "llama-cpp-python" + (f"=={wanted}" if (wanted := _wanted_version()) else "")
    lacking = [name for name in sorted(features) if name in _CPU_FLAGS and _CPU_FLAGS[name] not in flags]
    if lacking:
        return fail(f"built for {' '.join(lacking)}, which this processor does not have", rebuild)
    unused = [name for name, flag in _CPU_FLAGS.items() if name not in features and flag in flags]
    if unused:
        return warn(f"{said}; the processor also has {' '.join(unused)}, so it could be faster", rebuild)
    return ok(said)


def symbols(examination: Examination) -> Verdict | None:
    """The functions that hidden states and rollback need are in the libraries."""
    answer = examination.answer("symbols")
    if answer is None or not examination.answers["llama"].ok:
        return None
    if not answer.ok:
        return fail(f"looking for llama.cpp's functions: {answer.error}", "install it anew (see llama-cpp)")
    if answer.value:
        return fail(f"llama.cpp lacks {', '.join(answer.value)}", "install the version that is wanted (see llama-cpp)")
    return ok("callbacks, tensor access, rollback and checkpoints are there")


def structures(examination: Examination) -> Verdict | None:
    """The bindings describe the structures of the library that is loaded."""
    answer = examination.answer("defaults")
    if answer is None or not examination.answers["llama"].ok:
        return None
    fix = "unset LLAMA_CPP_LIB_PATH" if os.environ.get("LLAMA_CPP_LIB_PATH") else "install it anew (see llama-cpp)"
    if not answer.ok:
        return fail(f"asking llama.cpp for its defaults: {answer.error}", fix)
    if answer.value:
        return fail(f"bindings and library do not belong together: {', '.join(answer.value)}", fix)
    return ok("bindings and library belong together")


def onnxruntime(examination: Examination) -> Verdict:
    """ONNX Runtime runs a probe, on one thread, as this program writes them."""
    answer = examination.answer("onnx")
    assert answer is not None, "it is always asked for"
    if answer.ok:
        facts = answer.value
        return ok(
            f"{facts['version']}; ONNX IR {facts['ir_version']}, opset {facts['opset']} ran on one thread; "
            f"providers: {' '.join(facts['providers'])}"
        )
    if "cannot be imported" in (answer.error or "") or answer.kind in ("ModuleNotFoundError", "ImportError"):
        return fail(f"onnxruntime: {answer.error}", "pip install --force-reinstall onnxruntime")
    if answer.kind == "ProbeError":
        return fail(
            f"a shipped probe does not run: {answer.error}", "update onnxruntime, or install semspec-local anew"
        )
    return fail(f"onnxruntime: {answer.error}", "pip install --force-reinstall onnxruntime")


def _wanted_version() -> str | None:
    """The version that this package asks for; None where it was never installed."""
    try:
        required = metadata.requires("semspec-local") or []
    except metadata.PackageNotFoundError:
        return None
    found = [re.match(r"llama[-_]cpp[-_]python\s*==\s*([\w.]+)", line) for line in required]
    return next((match[1] for match in found if match), None)


def _installed() -> metadata.Distribution | None:
    try:
        return metadata.distribution("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


def _is_upstream(installed: metadata.Distribution) -> bool:
    """Forks keep the name of the module and of the package; their pages are elsewhere."""
    pages = [*(installed.metadata.get_all("Project-URL") or []), *(installed.metadata.get_all("Home-page") or [])]
    return not pages or any("/abetlen/" in page for page in pages)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _cpu_flags(root: Path) -> set[str] | None:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else None


def _yes(value: bool) -> str:
    return "yes" if value else "no"
