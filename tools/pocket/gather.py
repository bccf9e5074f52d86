"""Gathers the text to learn from: the documentation that comes with the Rust toolchain (MIT OR Apache-2.0), as clean text.

    python gather.py --out work/docs.jsonl                      # the toolchain's, `rustup component add rust-docs`
    python gather.py --out work/docs.jsonl --markdown FOLDER    # a few Markdown files instead, for a try-out

One page a line: `{"src", "text"}`. Paragraphs that stand on several pages are kept once; navigation, lists of implementations,
translations and signatures without a text go.
"""

import argparse
import glob
import hashlib
import json
import os
import pathlib
import re
import subprocess

import lxml.html

BOOKS = "book reference rust-by-example nomicon cargo edition-guide embedded-book rustc rustdoc error_codes clippy".split()
ITEMS = "std core alloc".split()
SKIPPED = re.compile(
    r"/(arch|core_arch|simd|core_simd|print|all|SUMMARY|toc|1st-edition|2018-edition|first-edition|second-edition)[./]"
    r"|/constant\.|keyword\.SelfTy|/(index|intro)_?list|-edition/print"
)
NOT_TEXT = ("nav", "script", "style", "button", "rustdoc-toolbar", "svg", "img", "iframe", "footer", "form")
NOT_TEXT_IDS = [f"{kind}-implementations{end}" for kind in ("synthetic", "blanket") for end in ("", "-list")] + [
    "implementors-list",
    "implementors",
]
SHORTEST_PAGE, LONGEST_CODE = 200, 6000


def clean(text):
    return re.sub(r"[ \t\r\n\f]+", " ", text).strip().strip("§").strip()


def inline(element):
    """an element's text, code in back-ticks"""
    out = [element.text or ""]
    for child in element:
        kind = child.get("class") or ""
        if not isinstance(child.tag, str):
            pass
        elif child.tag in ("button", "script", "style", "rustdoc-toolbar") or "anchor" in kind or "since" in kind or kind == "src":
            pass
        elif child.tag == "code":
            out.append(f"`{child.text_content()}`")
        elif child.tag == "br":
            out.append(" ")
        elif child.tag not in ("pre", "ul", "ol", "table"):
            out.append(inline(child))
        out.append(child.tail or "")
    return "".join(out)


def code(element):
    lines = element.text_content().replace("\xa0", " ").rstrip("\n").split("\n")
    return "\n".join(line.rstrip() for line in lines if not line.startswith("# ")).strip("\n")


def walk(element, out):
    """adds (kind, text) of an element's children"""
    for child in element:
        kind, tag = child.get("class") or "", child.tag
        if not isinstance(tag, str) or tag in NOT_TEXT or any(word in kind for word in ("nav-wrapper", "sidebar", "breadcrumbs")):
            continue
        if child.get("id") in NOT_TEXT_IDS or "stab" in kind.split() or "notable" in kind:
            continue
        if re.fullmatch("h[1-6]", tag):
            if "code-header" in kind:
                out.append(("signature", clean(child.text_content())))
            else:
                out.append(("heading", "#" * int(tag[1]) + " " + clean(inline(child).replace("Copy item path", ""))))
        elif tag == "p":
            out.append(("paragraph", clean(inline(child))))
            out += [("code", code(pre)) for pre in child.iter("pre")]
        elif tag == "pre":
            out.append(("code", code(child)))
        elif tag in ("ul", "ol"):
            for item in child.iterchildren("li"):
                if item.find("p") is not None:
                    walk(item, out)
                    continue
                if text := clean(inline(item)):
                    out.append(("item", "- " + text))
                for inner in item:
                    if inner.tag in ("ul", "ol", "pre"):
                        box = lxml.html.Element("div")
                        box.append(inner)
                        walk(box, out)
        elif tag == "dt":
            out.append(("item", "- " + clean(inline(child))))
        elif tag == "dd":
            out.append(("item", "  " + clean(inline(child))))
        elif tag == "table":
            for row in child.iter("tr"):
                if cells := [clean(inline(cell)) for cell in row if cell.tag in ("td", "th")]:
                    out.append(("item", "| " + " | ".join(cells) + " |"))
        else:
            walk(child, out)


def page(path):
    html = open(path, encoding="utf8", errors="ignore").read()
    if 'http-equiv="refresh"' in html[:600]:
        return []
    root = lxml.html.fromstring(html)
    main = root.xpath('//*[@id="main-content"]') or root.xpath("//main")
    out = []
    if main:
        walk(main[0], out)
    kept = []
    for i, (kind, text) in enumerate(out):
        documented = i + 1 < len(out) and out[i + 1][0] in ("paragraph", "code")
        if text and text != "Expand description" and (kind != "signature" or documented):
            kept.append((kind, text))
    return kept


def render(blocks):
    out, before = "", None
    for kind, text in blocks:
        if kind == "code":
            text = f"```rust\n{text}\n```" if len(text) < LONGEST_CODE else ""
        elif kind == "signature":
            text = f"`{text}`"
        if text:
            between = "" if not out else "\n" if kind == before == "item" else "\n\n"
            out, before = out + between + text, kind
    return out


def gathered(root):
    """pages of the toolchain's documentation"""
    seen = set()
    for folder in BOOKS + ITEMS:
        for path in sorted(glob.glob(f"{root}/{folder}/**/*.html", recursive=True)):
            source = path[len(root) :]
            if SKIPPED.search(source):
                continue
            fresh = []
            for kind, text in page(path):
                key = hashlib.md5(text.encode()).digest()
                if kind != "heading" and len(text) > 24 and key in seen:
                    continue
                seen.add(key)
                fresh.append((kind, text))
            blocks = [b for i, b in enumerate(fresh) if not empty_section(fresh, i)]
            if sum(len(text) for kind, text in blocks if kind in ("paragraph", "code", "item")) >= SHORTEST_PAGE:
                yield dict(src=source, text=render(blocks))


def empty_section(blocks, i):
    """a heading with nothing under it"""
    if blocks[i][0] != "heading" or i + 1 == len(blocks) or blocks[i + 1][0] != "heading":
        return False
    return len(blocks[i + 1][1].split()[0]) <= len(blocks[i][1].split()[0])


def sections(folder):
    """sections of Markdown files as pages"""
    for path in sorted(pathlib.Path(folder).glob("*.md")):
        for number, text in enumerate(re.split(r"\n(?=#+ )", path.read_text())):
            if len(text) >= SHORTEST_PAGE:
                yield dict(src=f"/{path.name}/{number}", text=text.strip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="work/docs.jsonl")
    parser.add_argument("--markdown", action="append", default=[], help="a folder with Markdown files; may be given several times")
    options = parser.parse_args()
    if options.markdown:
        pages = [page for folder in options.markdown for page in sections(folder)]
    else:
        toolchain = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
        root = f"{toolchain}/share/doc/rust/html"
        if not os.path.isdir(root):
            raise SystemExit(f"{root} is not there: rustup component add rust-docs")
        pages = list(gathered(root))
    os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
    with open(options.out, "w") as out:
        for entry in pages:
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")
    print(f"{len(pages)} pages, {sum(len(entry['text'].encode()) for entry in pages)} bytes")


if __name__ == "__main__":
    main()
