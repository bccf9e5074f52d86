#!/usr/bin/env python3
"""Copies what the project's own tests need out of a folder with reference data (golden/, pocket/, reference/) into
tests/fixtures. Standard library only.

    python3 tools/make_fixtures.py /path/to/shared
"""
import pathlib
import shutil
import sys

FILES = [
    # A whole checkpoint in the released packed layout, and the Engram constants and tokens that belong to it.
    "golden/ckpt_fp8fp4/config.json",
    "golden/ckpt_fp8fp4/model.safetensors",
    "golden/ckpt_fp8fp4/tokenizer.json",
    "golden/inputs.safetensors",
    # What was recorded of the model in models/pocket.
    "pocket/export/config.json",
    "pocket/export/engram_constants.json",
    "pocket/export/expected.json",
    # The release: config, names and shapes, Engram constants.
    "reference/released-config.json",
    "reference/full_size_tensors.json",
    "reference/real_engram_constants.json",
]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = pathlib.Path(sys.argv[1])
    target = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures"
    for name in FILES:
        copy = target / name.replace("pocket/export/", "pocket/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy)
    print(f"{sum(f.stat().st_size for f in target.rglob('*') if f.is_file())} bytes in {target}")


if __name__ == "__main__":
    main()
