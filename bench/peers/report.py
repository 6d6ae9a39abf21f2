"""Makes a page from the samples of measure.py: report.py RAW FOLDER [COMMAND].

Writes engines.md and engines.svg.
"""

import html
import json
import math
import pathlib
import statistics
import sys

import model
import sides

WIDTH, LEFT, ROW, TOP = 800, 250, 22, 62
COLOURS = {"same": "#2b7bba", "restart": "#c0392b"}
LIVES = {"same": "before a restart", "restart": "after a restart"}
KINDS = {"full": "3,000 tokens, all stored", "part": "2,000 stored + 1,000 new tokens"}
PLAIN = "plain "
REFERENCES = ["prefix", "reference"]


class Samples:
    def __init__(self, raw):
        self.raw, self.by = raw, {}
        for sample in raw["samples"]:
            key = sample["side"], sample["life"], sample["kind"]
            self.by.setdefault(key, {})[sample["number"]] = sample

    def of(self, side, life, kind):
        """Returns the samples by number."""
        return self.by.get((side, life, kind), {})

    def ttft(self, side, life, kind):
        return [sample["ttft"] for sample in self.of(side, life, kind).values()]

    def wrong(self, side, life, kind):
        """Counts answers that differ both from a full computation and from vLLM's own prefix cache
        with as many tokens."""
        key = {"life": life, "kind": kind}
        return sum(
            all(
                right["tokens"] != sample["tokens"]
                for right in self.raw["samples"]
                if (key | {"number": number}).items() <= right.items()
                and (
                    right["side"] == "computed"
                    or (right["side"] in REFERENCES and right["cached"] == sample["cached"])
                )
            )
            for number, sample in self.of(side, life, kind).items()
        )

    def cost(self, side, life, kind):
        """Returns (bytes/s, CPU seconds per GB) of loading: the difference to vLLM's prefix cache
        with the same tokens."""
        base = self.of("prefix", life, kind)
        speeds, costs = [], []
        for number, sample in self.of(side, life, kind).items():
            size = sample["cached"] * self.raw["token_bytes"]
            if size == 0 or number not in base:
                continue
            longer = sample["ttft"] - base[number]["ttft"]
            speeds.append(size / longer if longer > 0 else float("inf"))
            costs.append((sample["cpu"] - base[number]["cpu"]) / (size / 1e9))
        return (statistics.median(speeds), statistics.median(costs)) if speeds else None

    def ratios(self, side, other, life, kind):
        """Returns the ratio of TTFTs for each turn."""
        ours, theirs = self.of(side, life, kind), self.of(other, life, kind)
        return [ours[turn]["ttft"] / theirs[turn]["ttft"] for turn in ours if turn in theirs]

    def plain(self, life, kind):
        """Returns the fastest way to read the same bytes: its name, and seconds of each turn."""
        names = {side for side, *_ in self.by if side.startswith(PLAIN)}
        found = {name: self.ttft(name, life, kind) for name in names}
        return min(found.items(), key=lambda item: statistics.median(item[1]))


def spread(values, scale=1e3, digits=0):
    middle = statistics.median(values)
    texts = [f"{value * scale:,.{digits}f}" for value in (middle, min(values), max(values))]
    return f"{texts[0]} ({texts[1]} - {texts[2]})"


def row(samples, side, life, kind):
    """Returns the cells of a table row."""
    if why := samples.raw["failed"].get(side):
        return [f"does not run: {why}", "", "", "", ""]
    found = samples.of(side, life, kind)
    if not found:
        return ["-", "", "", "", ""]
    cached = statistics.median(sample["cached"] for sample in found.values())
    wrong = samples.wrong(side, life, kind)
    tokens = f"**wrong** ({wrong} of {len(found)})" if wrong else "right"
    speed = cost = "-"
    if side not in ("computed", "prefix") and (both := samples.cost(side, life, kind)):
        speed = "no longer" if both[0] == float("inf") else f"{both[0] / 1e9:.2f}"
        cost = f"{both[1]:.2f}"
    return [spread([s["ttft"] for s in found.values()]), f"{cached:,.0f}", speed, cost, tokens]


def verdicts(samples):
    """Returns the two judged criteria, for each of our connectors."""
    there = [side for side in sides.SIDES if samples.ttft(side, "restart", "full")]
    ours = [side for side in there if side in sides.OURS]
    theirs = [side for side in there if side not in [*ours, "computed", "prefix"]]
    lines = []
    for life, text in LIVES.items():
        name, reads = samples.plain(life, "full")
        base = statistics.median(samples.ttft("prefix", life, "full"))
        limit = 1.1 * base + statistics.median(reads)
        for side in ours:
            took = statistics.median(samples.ttft(side, life, "full"))
            lines.append(
                f"**{'met' if took <= limit else 'missed'}**: {sides.SIDES[side].title}, {text}: "
                f"{took * 1e3:.0f} ms; at most 1.1 x {base * 1e3:.0f} ms of vLLM's prefix cache + "
                f"{statistics.median(reads) * 1e3:.0f} ms of a plain O_DIRECT read ({name}) = "
                f"{limit * 1e3:.0f} ms"
            )
    for kind, title in KINDS.items() if theirs else ():
        for side in ours:
            ratios = {other: samples.ratios(side, other, "restart", kind) for other in theirs}
            best = all(statistics.median(each) < 1 for each in ratios.values())
            texts = [
                f"{spread(each, 1, 2)} of {sides.SIDES[other].title}"
                for other, each in ratios.items()
            ]
            lines.append(
                f"**{'met' if best else 'missed'}**: {sides.SIDES[side].title}, after a restart, "
                f"{title}, better than every peer: {'; '.join(texts)}"
            )
    return lines


def plot(samples):
    """Plots a dot per turn and a line for the median, with one panel per kind of prompt."""
    names = [side for side in sides.SIDES if side not in samples.raw["failed"]]
    panel = len(names) * ROW + TOP
    found = [s["ttft"] for s in samples.raw["samples"] if s["side"] in sides.SIDES]
    low, high = min(found) * 0.8, max(found) * 1.2
    height = panel * len(KINDS) + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]

    def x(seconds):
        return LEFT + (WIDTH - LEFT - 30) * math.log(seconds / low) / math.log(high / low)

    for index, (kind, title) in enumerate(KINDS.items()):
        top = index * panel
        out.append(f'<text x="12" y="{top + 22}" font-size="16">{title}: TTFT, ms</text>')
        for life, at in zip(LIVES, (LEFT, LEFT + 170), strict=True):
            out.append(f'<circle cx="{at}" cy="{top + 36}" r="4" fill="{COLOURS[life]}"/>')
            out.append(f'<text x="{at + 10}" y="{top + 41}">{LIVES[life]}</text>')
        for tick in (0.03, 0.1, 0.3, 1, 3):
            if low < tick < high:
                out.append(
                    f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top + 48}" '
                    f'y2="{top + panel - 12}" stroke="#dddddd"/><text x="{x(tick):.1f}" '
                    f'y="{top + panel}" text-anchor="middle">{tick * 1e3:,.0f}</text>'
                )
        for number, name in enumerate(names):
            y = top + TOP + number * ROW
            out.append(
                f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">'
                f"{html.escape(sides.SIDES[name].title)}</text>"
            )
            for life, shift in zip(LIVES, (-4, 4), strict=True):
                values = samples.ttft(name, life, kind)
                out += [
                    f'<circle cx="{x(value):.1f}" cy="{y + shift}" r="3" fill="{COLOURS[life]}" '
                    'fill-opacity="0.45"/>'
                    for value in values
                ]
                if values:
                    middle = x(statistics.median(values))
                    out.append(
                        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y + shift - 5}" '
                        f'y2="{y + shift + 5}" stroke="{COLOURS[life]}" stroke-width="2.5"/>'
                    )
    return "\n".join([*out, "</svg>"]) + "\n"


HEAD = ["", "TTFT, ms: median (lowest - highest)", "tokens found", "GB/s", "CPU s/GB", "answers"]


def sections(samples, command):
    """Yields the page's sections: ("text" | "list" | "table" | "plot" | "head", content)."""
    raw = samples.raw
    machine, load = raw["machine"], raw["load"]
    yield "head", "vLLM with Ripieno and with others"
    yield "text", (
        "Time to first token (TTFT) of the same prompts on the same model, machine and directory, "
        f"each prompt asked of every engine in turn. Made by `{command}`."
    )
    turns = len(samples.of("computed", "same", "full"))
    versions = ", ".join(f"{name} {version}" for name, version in raw["versions"].items())
    yield "list", [
        f"Machine: {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, "
        f"{machine['disk']}; {raw['date']}. Load average at the start and the end: "
        f"{load[0]:.1f} and {load[1]:.1f}"
        + ("; with a real-time priority, before all other work." if machine["realtime"] else ".")
        + (f" nice {machine['nice']}." if machine["nice"] else ""),
        f"Versions: {versions}. vLLM's CPU backend with one thread for computing, engine core and "
        f"worker in one process; a random Llama of 8 layers, {raw['dtype']}, blocks of 32 tokens, "
        f"{raw['token_bytes'] * 32 // model.LAYERS >> 10} KiB a block and layer.",
        f"{turns} prompts of each kind. Engines are alive at the same time, and idle while another "
        "one answers; the order differs from prompt to prompt. Each prompt was stored before; "
        "vLLM's own prefix cache is emptied before each question, but in the row of its name.",
        "After a restart: all engines (and LMCache's server) ended and started again; every file "
        "was dropped from the page cache (sync, then posix_fadvise DONTNEED), and no prompt was "
        "asked before. Ripieno, vLLM's file tier and LMCache's server (as configured here) bypass "
        f"it: O_DIRECT. Left in it: {left(raw['resident'])}.",
        "GB/s: bytes loaded, by what TTFT is longer than that of vLLM's prefix cache in the same "
        "turn; CPU s/GB: CPU time of all threads and of LMCache's server up to the first token, in "
        "the same way. What a peer computes more, because it stores whole chunks only, counts.",
        "Answers: 8 tokens, compared with those computed again. Some differ when fewer tokens are "
        "computed at once, for sums are rounded differently then; so right is as well what vLLM's "
        "own prefix cache answers when it has as many tokens.",
    ]
    yield "plot", ""
    yield "head", "Verdicts"
    yield "list", verdicts(samples)
    for kind, title in KINDS.items():
        for life, when in LIVES.items():
            yield "head", f"{title}: {when}"
            rows = [[sides.SIDES[s].title, *row(samples, s, life, kind)] for s in sides.SIDES]
            for name in sorted({side for side, *_ in samples.by if side.startswith(PLAIN)}):
                values = samples.ttft(name, life, kind)
                rows.append([f"the same bytes, {name}, O_DIRECT", spread(values), "", "", "", ""])
            yield "table", rows
    yield "head", "Storing: 3,000 tokens computed for the first time"
    rows = []
    for side in sides.SIDES:
        values = samples.ttft(side, "fill", "full")
        if values:
            cpu = statistics.median(s["cpu"] for s in samples.of(side, "fill", "full").values())
            rows.append([sides.SIDES[side].title, spread(values), "", "", f"{cpu:.2f} s", ""])
    yield "table", rows
    notes = [f"{side.title}: {side.note}" for side in sides.SIDES.values() if side.note]
    yield "head", "Configurations"
    yield "list", notes
    yield "list", [
        f"{side.title}: `{side.commands()}`"
        for side in sides.SIDES.values()
        if side.configuration
    ]


def left(resident):
    known = {name: size for name, size in resident.items() if size}
    if any(size is None for size in resident.values()):
        return "not known on this kernel"
    texts = [f"{size >> 10} KiB of {name}" for name, size in known.items()]
    return ", ".join(texts) or "nothing"


def markdown(parts):
    level = "#"
    for kind, content in parts:
        if kind == "head":
            yield f"{level} {content}\n"
            level = "##"
        elif kind == "text":
            yield f"{content}\n"
        elif kind == "list":
            yield "\n".join(f"- {line}" for line in content) + "\n"
        elif kind == "plot":
            yield "![TTFT of each side](engines.svg)\n"
        else:
            lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * 6, *content)]
            yield "\n".join(lines) + "\n"


def main(raw, folder, command="cargo xtask peers"):
    samples = Samples(json.loads(pathlib.Path(raw).read_text()))
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engines.md").write_text("\n".join(markdown(sections(samples, command))))
    (folder / "engines.svg").write_text(plot(samples))


if __name__ == "__main__":
    main(*sys.argv[1:])
