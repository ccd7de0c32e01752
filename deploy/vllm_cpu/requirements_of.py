"""Print the requirements of an installed distribution that a CPU server needs, one a line."""

import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

# torch is there already; the others are built for another torch, or (xgrammar) installed without triton.
SKIPPED = {"torch", "torchaudio", "torchvision", "torchcodec", "xgrammar"}

for line in importlib.metadata.requires(sys.argv[1]) or []:
    requirement = Requirement(line)
    if requirement.name in SKIPPED:
        continue
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    requirement.marker = None
    print(requirement)
print("apache-tvm-ffi")  # xgrammar's only other need
