"""Who may import whom. The folder tells; this test holds it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"sparseety", "proxy", "sampler_hook", "verifier", "deploy", "tests"}
STDLIB = set(sys.stdlib_module_names)

# folder -> what its modules may import besides the standard library and themselves
ALLOWED = {
    "sparseety": {"msgspec"},
    "proxy": {
        "sparseety",
        "fastapi",
        "httptools",
        "httpx",
        "msgspec",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "uvicorn",
        "uvloop",
    },
    "sampler_hook": {"sparseety", "msgspec"},
    "verifier": {
        "sparseety",
        "httpx",  # stability runs alone
        "huggingface_hub",
        "msgspec",
        "packaging",
        "prometheus_client",
        "tokenizers",
    },
}
# inside functions only: loaded where and when it is there
ALLOWED_LATE = {
    "proxy": {"brotli", "opentelemetry", "zstandard"},
    "sampler_hook": {"vllm", "torch", "transformers", "huggingface_hub", "prometheus_client"},
    "sparseety": {"zstandard"},
}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(imported when the module is, imported inside functions): top-level names."""
    tree = ast.parse(path.read_text())
    late_nodes = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    early: set[str] = set()
    late: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which folder is meant"
            names = {(node.module or "").partition(".")[0]}
        else:
            continue
        (late if id(node) in late_nodes else early).update(names)
    return early - STDLIB, late - STDLIB


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_each_folder_imports_only_what_its_place_allows(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        early, late = imports(path)
        allowed = ALLOWED[folder] | {folder}
        assert early <= allowed, f"{path.relative_to(ROOT)} may not import {sorted(early - allowed)}"
        allowed |= ALLOWED_LATE.get(folder, set())
        assert late <= allowed, f"{path.relative_to(ROOT)} may not import {sorted(late - allowed)} even late"


def test_of_the_programs_the_demo_backend_may_import_the_recorder_only():
    for path in sorted((ROOT / "deploy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                top = module.split(".")[0]
                assert top not in PACKAGES - {"sparseety", "deploy"} or module == "sampler_hook.recorder", path


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded after a statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.split())


def test_the_proxy_loads_no_machine_learning_library():
    assert not loaded_by("import proxy.app") & {"torch", "transformers", "vllm", "tokenizers", "numpy"}


def test_the_plugin_loads_the_standard_library_msgspec_and_the_contract_only():
    before = loaded_by("pass")  # site-packages may load things of their own at start (editable installs do)
    added = loaded_by("import sampler_hook, sampler_hook.recorder") - before - STDLIB
    added.discard("typing_extensions")  # msgspec takes it along where it is installed
    assert {name for name in added if not name.startswith("_")} == {"msgspec", "sampler_hook", "sparseety"}
