"""TierForce: exact long-context decoding on consumer GPUs."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="tierforce",
    version="0.2.0",
    description=(
        "Exact long-context decoding on consumer GPUs: the KV cache in host memory, hierarchical "
        "speculation"
    ),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["offload*", "parallel*", "decoding*", "tierforce"]),
    package_data={
        "decoding": ["py.typed"],
        "decoding.planning": ["profiles.json"],
        "decoding.app.hardware": ["models.json"],
        "decoding.app.server.http": ["page/*"],
        "parallel": ["py.typed"],
        "offload": ["py.typed"],
        "tierforce": ["py.typed"],
    },
    install_requires=[
        "torch>=2.11,<2.16",
        "transformers>=5.0,<6",
        "accelerate>=1.10",
        "safetensors>=0.5",
        "huggingface_hub>=1.0",
        "numpy>=1.26",
        "psutil>=5.9",
        "nvidia-ml-py>=12.535",
        "typer>=0.15",
        "rich>=13.0",
        "markdown-it-py>=2.2",
        "jinja2>=3.1",
        "tokenizers>=0.22",
        "gguf>=0.17",
        # grammars of answers, token by token
        "llguidance>=1.9,<2",
    ],
    extras_require={
        "flash": ["flash-attn>=2.6"],
        # kernels for prompts of models with gated delta nets
        "delta": ["fla-core>=0.6"],
        "bench": ["matplotlib>=3.8"],
        "server": [
            "fastapi>=0.115.12",
            "starlette>=0.51",
            "pydantic>=2.10",
            "uvicorn>=0.32",
            "sse-starlette>=2.3.2",
            "prometheus-client>=0.21",
        ],
        # readers of PDF, EPUB, DOCX and others; text needs none
        "documents": [
            "beautifulsoup4>=4.13",
            "charset-normalizer>=3.4",
            "defusedxml>=0.7",
            "mammoth>=1.11",
            "markdownify>=1.2",
            "pypdfium2>=5",
            "python-pptx>=1.0",
        ],
        "cluster": ["ray[data]>=2.60,<2.64"],
        "peers": ["datasets>=3.0", "deepspeed>=0.18", "llama-cpp-python>=0.3.16"],
        "dev": [
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "jsonschema>=4.20",
            "ruff>=0.12",
            "mypy>=1.14",
            # writes quantised checkpoints
            "compressed-tensors>=0.20; python_version >= '3.11'",
            # clients of the server and its page
            "openai>=1.60",
            "playwright>=1.49",
            "axe-core-python>=0.1",
            "setuptools>=70.1",
            # its interpreter runs the fused kernels without a GPU
            "triton>=3.5; sys_platform == 'linux' and platform_machine == 'x86_64'",
        ],
    },
    entry_points={"console_scripts": ["tierforce=decoding.app.main:main"]},
)
