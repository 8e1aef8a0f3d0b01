"""Packaging of osdp; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
#: The package is read, not imported: building it needs none of what it depends on.
(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "osdp" / "__init__.py").read_text(encoding="utf8"), re.MULTILINE
)

HF = ["transformers>=5"]
CHECKPOINT = ["isal>=1.6"]
CLI = ["typer>=0.12", "rich>=13", "tqdm>=4.66", "pyyaml>=6"]
REPORT = ["matplotlib>=3.8", "plotly>=5.20"]
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=1.0"]
DEV = [
    "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.14",
    "scipy>=1.12", "allpairspy>=2.5", "peft>=0.17",
    "accelerate>=1.10", "lightning>=2.6",
]  # fmt: skip
KEYWORDS = [
    "pytorch", "distributed training", "data parallelism", "fsdp", "sharding", "zero", "pipeline parallelism",
    "tensor parallelism", "activation checkpointing", "automatic parallelism",
]  # fmt: skip

# A package index has no files beside the README: links to them become the names that they show.
README = (ROOT / "README.md").read_text(encoding="utf8")
DESCRIPTION = re.sub(r"!?\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", README)

setup(
    name="osdp",
    version=VERSION,
    description="Per-operator sharding for PyTorch data parallelism: the fastest plan that fits the memory",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    author="The osdp developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=KEYWORDS,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["osdp", "osdp.*"]),
    package_data={"osdp": ["py.typed", "cluster/*.json", "report/html/page.*s"]},
    # Torch has an upper bound since private parts of it are used; each new version is tried first.
    install_requires=["torch>=2.11,<2.14", "numpy", "networkx>=3", "fairscale>=0.4.13"],
    extras_require={
        "hf": HF,
        "checkpoint": CHECKPOINT,
        "cli": CLI,
        "report": REPORT,
        "docs": DOCS,
        "dev": [*DEV, *CHECKPOINT, *CLI, *HF, *REPORT, *DOCS],
    },
    entry_points={"console_scripts": ["osdp=osdp.cli.main:main"]},
)
