#!/usr/bin/env python3
"""A folder in the layout of Hugging Face kernels, for kernels.get_local_kernel or an upload to the Hub:

    hf_kernel_folder.py OUT [--library build/libevenkeel.so]

OUT/build/torch-universal is the package with the library in it, which links neither PyTorch nor Python; OUT/build/torch-universal/
evenkeel exports the same, for older versions of kernels.
"""
import argparse
import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
INNER = '''"""The package one folder above, for versions of kernels that look here."""
import importlib.util
import pathlib
import sys

_place = pathlib.Path(__file__).resolve().parents[1] / "__init__.py"
_spec = importlib.util.spec_from_file_location(__name__ + "_package", _place, submodule_search_locations=[str(_place.parent)])
_package = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_package)
globals().update({name: getattr(_package, name) for name in _package.__all__})
__all__ = _package.__all__
'''
CARD = """---
tags: [kernel]
license: mit
---
# evenkeel
Attention whose rounding errors do not add up: `flash_attn_func` and `flash_attn_varlen_func` with FlashAttention's signatures, and the
instruments of the package (`Monitor`, `Guard`, `coverage`).
"""


def write(out, library):
    variant = pathlib.Path(out) / "build" / "torch-universal"
    (variant / "evenkeel").mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "python" / "evenkeel").glob("*.py"):
        shutil.copy(file, variant / file.name)
    shutil.copy(library, variant / "libevenkeel.so")
    (variant / "evenkeel" / "__init__.py").write_text(INNER)
    (variant / "metadata.json").write_text('{"python-depends": []}\\n')
    (pathlib.Path(out) / "README.md").write_text(CARD)
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--library", default=str(ROOT / "build" / "libevenkeel.so"))
    options = parser.parse_args()
    print(write(options.out, options.library))
