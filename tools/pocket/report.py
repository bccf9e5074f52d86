"""Makes tables and a plot of what `examples/measure.rs` found.

    python report.py --results "v0=results-v0.jsonl" "v1=results.jsonl" --baselines baselines.json --page docs/pocket.md --plot docs/pocket.svg

Of the page, what is between `<!-- tables -->` and `<!-- end -->` is replaced.
"""

import argparse
import collections
import json
import math
import re

COLOURS = ("#b0562c", "#2f6f8f", "#5a7d3a", "#7a4f8f")
DEPTHS = (0, 25, 50, 75, 100)
NAMES = dict(retrieval="retrieval", turns="in one conversation", absent="not in the text", copying="8 words repeated")


def has_value(answer, value):
    """whether an answer contains the value as a whole: not as a part of a longer word, number or version"""
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-]|\.\w)", answer) is not None


class Results:
    def __init__(self, path):
        with open(path) as file:
            self.tasks = [json.loads(line) for line in file]

    def questions(self, name, **where):
        for task in self.tasks:
            if task.get("name") == name and all(task.get(k) == v for k, v in where.items()):
                yield from task["questions"]

    def share(self, questions, exact=False):
        """(right, asked)"""
        right = [q["answer_made"].strip() == q["answer"] if exact else has_value(q["answer_made"], q["value"]) for q in questions]
        return sum(right), len(right)

    def same_answers(self, other):
        """(name, length, questions, answers that are the same, right, right in the other) of what both were asked"""

        def asked(task):
            return tuple((q["question"], q["value"]) for q in task.get("questions", []))

        known = {asked(task): task for task in other.tasks if task["task"] == "questions"}
        rows = collections.OrderedDict()
        for task in self.tasks:
            twin = known.get(asked(task))
            if twin:
                row = rows.setdefault((task["name"], task["length"]), [0, 0, 0, 0])
                for here, there in zip(task["questions"], twin["questions"]):
                    found = [has_value(q["answer_made"], q["value"]) for q in (here, there)]
                    row[:] = [a + b for a, b in zip(row, [1, here["answer_made"] == there["answer_made"], *found])]
        return [key + tuple(row) for key, row in rows.items()]

    def lengths(self):
        return sorted({task["length"] for task in self.tasks if task.get("name") == "retrieval"})

    def bits_per_byte(self):
        texts = [task for task in self.tasks if task["task"] == "text"]
        size = sum(task["bytes"] for task in texts)
        return sum(task["nats"] for task in texts) / math.log(2) / size if size else None

    def modes(self, length):
        tasks = [task for task in self.tasks if task["task"] == "modes" and task["length"] == length]
        total = sum(task["predictions"] for task in tasks)
        return total, {k: sum(task[k] for task in tasks) for k in ("bounded_as_exact", "restored_as_never_left", "restored_as_exact")}

    def drafts(self, name):
        tasks = [task for task in self.tasks if task["task"] == "draft" and task["name"] == name]
        # A text that ended before its limit made the token that ends it, too.
        made, rounds = sum(task["made"] + (task["made"] < task["tokens"]) for task in tasks), sum(task["rounds"] for task in tasks)
        places = max((len(task["accepted"]) for task in tasks), default=0)

        def at(what, i):
            return sum(task[what][i] for task in tasks if i < len(task[what]))

        return made, rounds, [(at("accepted", i), at("verified", i)) for i in range(places)]


def percent(right, asked):
    return f"{100 * right / asked:.0f} %" if asked else ""


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def tables(results, baselines, brief, device):
    out, names = [], [name for name in results if name not in brief]
    out.append("### Summary\n")
    rows = []
    for name, r in results.items():
        bits = r.bits_per_byte()
        row = [name, f"{bits:.3f}" if bits else ""]
        lengths = sorted({n for other in results.values() for n in other.lengths()})
        row += [percent(*r.share(r.questions("retrieval", length=n))) for n in lengths]
        row += [percent(*r.share(r.questions(what))) for what in ("turns", "absent", "copying")]
        for kind in ("answers", "documentation"):
            made, rounds, _ = r.drafts(kind)
            row.append(f"{made / rounds:.2f}" if rounds else "")
        rows.append(row)
    head = (
        ["", "bits a byte"]
        + [f"{n:,}" for n in lengths]
        + ["in one conversation", "not in the text", "8 words repeated", "tokens a round, answers", "documentation"]
    )
    out.append(table(head, rows))
    if baselines:
        known = ", ".join(f"{name} {value:.3f}" for name, value in baselines.items() if name != "bytes")
        out.append(f"\nBits a byte of {baselines['bytes']:,} bytes of held-out documentation; for comparison: {known}.")
    for name in names:
        r = results[name]
        if not r.lengths():
            continue
        out.append(f"\n### Retrieval, {name}: by length and depth\n")
        rows = []
        for n in r.lengths():
            cells = [r.share(q for q in r.questions("retrieval", length=n) if q["depth"] == depth) for depth in DEPTHS]
            whole = r.share(r.questions("retrieval", length=n), exact=True)
            every = r.share(r.questions("retrieval", length=n))
            rows.append([f"{n:,}"] + [percent(*c) for c in cells] + [percent(*every), percent(*whole), str(every[1])])
        out.append(table(["tokens"] + [f"at {d} %" for d in DEPTHS] + ["all", "whole answer", "questions"], rows))
        out.append(f"\n### Retrieval, {name}: by kind of value\n")
        kinds = sorted({q["kind"] for q in r.questions("retrieval")})
        rows = [
            [f"{n:,}"] + [percent(*r.share(q for q in r.questions("retrieval", length=n) if q["kind"] == kind)) for kind in kinds]
            for n in r.lengths()
        ]
        out.append(table(["tokens"] + kinds, rows))
        lengths = sorted({task["length"] for task in r.tasks if task["task"] == "modes"})
        if lengths:
            out.append(f"\n### Reading, {name}: predictions whose best token is the same\n")
            rows = []
            for n in lengths:
                total, same = r.modes(n)
                rows.append([f"{n:,}"] + [f"{100 * v / total:.1f} %" for v in same.values()] + [str(total)])
            out.append(
                table(["tokens", "bounded prefill, exact prefill", "restored, never left", "restored, exact prefill", "predictions"], rows)
            )
        kinds = [kind for kind in ("answers", "documentation") if r.drafts(kind)[1]]
        if kinds:
            out.append(f"\n### Drafting, {name}: accepted by place in the block\n")
            rows = []
            for kind in kinds:
                made, rounds, places = r.drafts(kind)
                rows.append([kind] + [percent(*p) for p in places] + [f"{made / rounds:.2f}", f"{made} in {rounds}"])
            width = max(len(r.drafts(kind)[2]) for kind in kinds)
            out.append(table(["text"] + [str(i + 1) for i in range(width)] + ["tokens a round", "tokens in rounds"], rows))
    for name, there in device.items():
        out.append(f"\n### The device path, {name}: the same questions asked there\n")
        rows = []
        for what, n, asked, same, right, right_on_cpu in there.same_answers(results[name]):
            rows.append([NAMES[what], f"{n:,}", str(asked), str(same), percent(right, asked), percent(right_on_cpu, asked)])
        out.append(table(["", "tokens", "questions", "same answer, to the letter", "right", "right on the CPU"], rows))
    return "\n".join(out)


def plot(results):
    """retrieval by length, as SVG"""
    lengths = sorted({n for r in results.values() for n in r.lengths()})
    width, height, left, top = 640, 300, 56, 24
    across, down = width - left - 130, height - top - 48
    low, high = math.log2(lengths[0]), math.log2(max(lengths[-1], 2 * lengths[0]))

    def x(n):
        return left + across * (math.log2(n) - low) / (high - low)

    def y(share):
        return top + down * (1 - share)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#333">']
    out.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        out.append(f'<line x1="{left}" x2="{left + across}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for n in lengths:
        out.append(f'<text x="{x(n):.1f}" y="{top + down + 18}" text-anchor="middle">{n:,}</text>')
    out.append(f'<text x="{left + across / 2:.1f}" y="{height - 8}" text-anchor="middle">tokens of the document</text>')
    out.append(f'<text x="{left}" y="14">values found exactly, all kinds and depths</text>')
    for (name, r), colour in zip(results.items(), COLOURS):
        points = [(x(n), y(right / asked)) for n in r.lengths() for right, asked in [r.share(r.questions("retrieval", length=n))]]
        if points:
            out.append(
                f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
            out.append(f'<text x="{points[-1][0] + 10:.1f}" y="{points[-1][1] + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", nargs="+", required=True, help="NAME=FILE")
    parser.add_argument("--brief", nargs="*", default=[], help="names that are in the summary and in the plot only")
    parser.add_argument("--device", nargs="*", default=[], help="NAME=FILE of what the device path answered")
    parser.add_argument("--baselines")
    parser.add_argument("--page")
    parser.add_argument("--plot")
    options = parser.parse_args()
    results, device = (
        collections.OrderedDict((entry.split("=", 1)[0], Results(entry.split("=", 1)[1])) for entry in entries)
        for entries in (options.results, options.device)
    )
    baselines = json.load(open(options.baselines)) if options.baselines else None
    made = tables(results, baselines, options.brief, device)
    if options.page:
        with open(options.page) as file:
            page = file.read()
        before, rest = page.split("<!-- tables -->", 1)
        after = rest.split("<!-- end -->", 1)[1]
        with open(options.page, "w") as file:
            file.write(f"{before}<!-- tables -->\n\n{made}\n\n<!-- end -->{after}")
    else:
        print(made)
    if options.plot:
        with open(options.plot, "w") as file:
            file.write(plot(results))


if __name__ == "__main__":
    main()
