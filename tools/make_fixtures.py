#!/usr/bin/env python3
"""Copies what the project's own tests need out of a folder with reference data (golden/, reference/) into
tests/fixtures. Standard library only. What is recorded of the model in models/pocket, tools/pocket/export.py makes.

    python3 tools/make_fixtures.py /path/to/shared
"""
import json
import pathlib
import shutil
import sys

FILES = [
    # A whole checkpoint in the released packed layout, and the Engram constants and tokens that belong to it.
    "golden/ckpt_fp8fp4/config.json",
    "golden/ckpt_fp8fp4/model.safetensors",
    "golden/ckpt_fp8fp4/tokenizer.json",
    "golden/inputs.safetensors",
    # The release: config, names and shapes, Engram constants.
    "reference/released-config.json",
    "reference/full_size_tensors.json",
    "reference/real_engram_constants.json",
]

# Recorded conversations, in `encoding`: what of each record is compared. Left out are conversations with images, a response
# format or a strict tool, those that leave it to a default whether there is reasoning, the recorder's own errors, and replies that
# came in single characters, which end up the same.
CONVERSATIONS = {
    "render": ("name", "request", "prompt", "special_ranges"),
    "parse": ("name", "thinking", "text", "message", "finish_reason"),
}


def recorded(case):
    request = case.get("request", {"thinking": None})
    strict = any(tool["function"].get("strict") for tool in request.get("tools", []))
    other = case.get("images") or "response_format" in request or strict or "thinking" not in request
    return not ("error" in case or other or case.get("mode") == "chars")


def conversations(source, target):
    target.mkdir(exist_ok=True)
    shutil.copyfile(source / "LICENSE.deepseek-recipe", target / "LICENSE")
    for kind, fields in CONVERSATIONS.items():
        record = json.loads((source / f"{kind}.json").read_text())
        cases = [{field: case[field] for field in fields} for case in record["cases"] if recorded(case)]
        # A request is kept as text: the order of its keys shows in the prompt.
        cases = [case | {"request": json.dumps(case["request"], ensure_ascii=False)} if "request" in case else case for case in cases]
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        (target / f"{kind}.json").write_text(f'{{"source": {json.dumps(record["source"])}, "cases": [\n{lines}\n]}}\n')


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = pathlib.Path(sys.argv[1])
    target = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fixtures"
    for name in FILES:
        copy = target / name.replace("pocket/export/", "pocket/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy)
    conversations(source / "golden/encoding", target / "encoding")
    print(f"{sum(f.stat().st_size for f in target.rglob('*') if f.is_file())} bytes in {target}")


if __name__ == "__main__":
    main()
