"""Package metadata. Tool settings are in pyproject.toml, the tested versions in constraints.txt.

The base install is the planner with its command line: numpy, typer and rich, a few seconds and no
GPU stack. torch and Megatron are in the extra `megatron`, because a training image usually brings
its own builds of both (with version strings that PyPI does not know) and pip must not replace them.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The version, written once, in megatron_libra/__init__.py."""
    source = (ROOT / "megatron_libra" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    assert match is not None, "megatron_libra/__init__.py must set __version__"
    return match.group(1)


def read_readme() -> str:
    """The README as the long description."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


EXTRAS = {
    # To train: Megatron, and what its wheel uses without declaring it (psutil for checkpoints,
    # tensorboard for logs); pyyaml reads the run files of configs/.
    "megatron": [
        "megatron-core>=0.19,<0.21",
        "torch>=2.10",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "tensorboard>=2.16",
    ],
    # The FlashAttention-4 kernels for Hopper and newer. Only pre-releases exist and their calls
    # change, so just the tested one (executor/kernels/fa4.py checks it). Beside a torch for CUDA 13
    # add its own extra: "flash-attn-4[cu13]==4.0.0b36".
    "fa4": ["flash-attn-4==4.0.0b36"],
    "plots": ["matplotlib>=3.8"],
    "parquet": ["pyarrow>=15"],
    "test": ["hypothesis>=6.100", "pytest>=8.2", "pytest-xdist>=3.6"],
    "dev": ["mypy>=1.11", "ruff>=0.6", "types-psutil", "types-PyYAML"],
}

setup(
    name="megatron-libra",
    version=read_version(),
    description="Attention load balancing for long-context LLM training, as a Megatron plugin",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_libra", "megatron_libra.*"]),
    # An editable install is then a path, not an import hook: beside a checkout in a folder of the
    # package's name, a hook would be asked after Python has taken that folder for the package.
    package_dir={"": "."},
    package_data={"megatron_libra": ["py.typed", "simulator/models/*.json"]},
    python_requires=">=3.12",
    install_requires=["numpy>=1.26", "rich>=13.7", "typer>=0.15.4"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["libra = megatron_libra.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
