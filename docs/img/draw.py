"""Draws the pictures of docs/concepts.md as SVG: `python docs/img/draw.py`. Needs nothing but Python.

tests/test_docs.py fails when a picture is not what this draws.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
INK, SOFT, BLUE, GREEN, RED, PALE = "#1f2933", "#7b8794", "#1f6feb", "#1a7f37", "#c2410c", "#eef2f6"

# Milliseconds of one verification by rows, SmolLM2 at int4 after 256 tokens, two threads (docs/native.md).
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
STOCK = (8.10, 8.78, 10.36, 11.58, 14.69, 17.38, 23.08, 29.11)
NATIVE = (4.02, 4.19, 4.47, 4.74, 5.79, 6.92, 9.18, 11.87)


def text(x: float, y: float, words: str, *, size: int = 14, color: str = INK, anchor: str = "start") -> str:
    """One line of text; `y` is its baseline."""
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{safe}</text>'


def box(
    x: float, y: float, width: float, height: float, *, fill: str = PALE, stroke: str = SOFT, dashed: bool = False
) -> str:
    """A rectangle with round corners."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="6" fill="{fill}" stroke="{stroke}"{dash}/>'


def line(points: Iterable[tuple[float, float]], *, color: str = SOFT, width: float = 1.6, arrow: bool = False) -> str:
    """A line through points, with an arrow's head at its end if asked."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    head = f' marker-end="url(#head-{color[1:]})"' if arrow else ""
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{head}/>'


def node(x: float, y: float, word: str, *, color: str = SOFT, fill: str = "#ffffff") -> str:
    """A token in a round box centred on (x, y)."""
    return box(x - 33, y - 15, 66, 30, fill=fill, stroke=color) + text(x, y + 5, word, anchor="middle", color=INK)


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole picture on white, so that it reads on a dark page too."""
    heads = "".join(
        f'<marker id="head-{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
        for color in (SOFT, BLUE, GREEN, RED)
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif">\n<title>{title}</title>\n<defs>{heads}</defs>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def tap() -> str:
    """The residual stream with its taps, and a draft that reads one of them."""
    names = ("embeddings", "block 0", "block 1", "block 2", "...", "block L-1", "final norm", "lm_head")
    parts, y = [], 330.0
    for i, name in enumerate(names):
        top = y - 40 * i
        parts.append(box(60, top - 13, 130, 26, fill="#ffffff" if name == "..." else PALE))
        parts.append(text(125, top + 5, name, anchor="middle"))
        if i < len(names) - 1:
            parts.append(line([(125, top - 14), (125, top - 26)], arrow=True))
        if i < len(names) - 2:  # the edge above box i is tap i
            number = {4: "L-1", 5: "L"}.get(i, str(i))
            chosen = i == 3
            parts.append(text(202, top - 15, f"tap {number}", size=12, color=BLUE if chosen else SOFT))
    parts.append(line([(240, 195), (330, 195)], color=BLUE, width=2.4, arrow=True))
    parts += [box(340, 165, 130, 60, stroke=BLUE), text(405, 190, "projection", anchor="middle")]
    parts.append(text(405, 210, "M x E to E", size=12, color=SOFT, anchor="middle"))
    parts.append(line([(470, 195), (510, 195)], color=BLUE, arrow=True))
    parts += [box(520, 150, 150, 90, stroke=BLUE), text(595, 180, "draft", anchor="middle")]
    parts.append(text(595, 200, "one block, and a head", size=12, color=SOFT, anchor="middle"))
    parts.append(text(595, 216, "of U tokens", size=12, color=SOFT, anchor="middle"))
    parts.append(line([(595, 150), (595, 116)], color=BLUE, arrow=True))
    parts.append(text(595, 106, "guesses of the next tokens", size=13, anchor="middle"))
    parts.append(line([(595, 300), (595, 246)], color=SOFT, arrow=True))
    parts.append(text(595, 318, "the embedding of the last token", size=13, anchor="middle"))
    parts += [text(60, 28, "the target", size=16), text(340, 28, "the draft reads tap 3 (m = 1)", size=16)]
    return svg(720, 360, "Taps of the target and the draft that reads one", parts)


def tree() -> str:
    """A chain and a tree of five nodes each, what the target accepts, and the bonus token."""
    parts = [text(30, 30, "a chain: budget N = 4, so 5 rows", size=16)]
    words = ("The", "river", "runs", "to", "sea")
    for i, word in enumerate(words):
        x = 70 + 110 * i
        if i:
            parts.append(line([(x - 77, 75), (x - 35, 75)], color=GREEN if i < 3 else SOFT, arrow=True))
        parts.append(node(x, 75, word, color=INK if i == 0 else GREEN if i < 3 else SOFT))
    parts += [text(70, 112, "root", size=12, color=SOFT, anchor="middle")]
    parts.append(text(180, 112, "accepted", size=12, color=GREEN, anchor="middle"))
    parts.append(text(290, 112, "accepted", size=12, color=GREEN, anchor="middle"))
    parts.append(text(355, 112, "the target says “down” instead", size=12, color=RED))
    parts.append(text(570, 80, "emitted: river runs down = 3 tokens", size=13))
    parts.append(line([(30, 140), (830, 140)], color=PALE))
    parts.append(text(30, 172, "a tree: budget N = 6, so 7 rows", size=16))
    at = {
        "The": (70, 280), "river": (190, 250), "lake": (190, 315), "runs": (310, 215), "is": (310, 280),
        "to": (430, 190), "down": (430, 240),
    }  # fmt: skip
    edges = (
        ("The", "river"), ("The", "lake"), ("river", "runs"), ("river", "is"), ("runs", "to"), ("runs", "down"),
    )  # fmt: skip
    good = {"river", "runs", "down"}
    for parent, child in edges:
        (x0, y0), (x1, y1) = at[parent], at[child]
        parts.append(line([(x0 + 34, y0), (x1 - 35, y1)], color=GREEN if child in good else SOFT, arrow=True))
    for word, (x, y) in at.items():
        parts.append(node(x, y, word, color=INK if word == "The" else GREEN if word in good else SOFT))
    parts.append(text(70, 317, "root", size=12, color=SOFT, anchor="middle"))
    parts.append(text(480, 245, "+ bonus “from”: the target's own next token, free", size=13, color=BLUE))
    parts.append(text(480, 275, "emitted: river runs down from = 4 tokens", size=13))
    parts.append(text(480, 305, "tau is this number, averaged over verifications", size=13, color=SOFT))
    return svg(860, 350, "A chain and a tree of drafted tokens", parts)


def cost() -> str:
    """What verifying n rows takes, in multiples of one row by the same kernels, and the tau that pays for it."""
    left, bottom, wide, high = 70.0, 300.0, 560.0, 250.0
    most = 4.0

    def at(rows: float, times: float) -> tuple[float, float]:
        return left + wide * (rows - 1) / 15, bottom - high * times / most

    parts = [line([(left, bottom - high), (left, bottom), (left + wide, bottom)], color=INK)]
    for times in range(5):
        x, y = at(1, times)
        parts += [line([(x, y), (x + wide, y)], color=PALE), text(x - 10, y + 5, f"{times}", size=12, anchor="end")]
    for rows in ROWS:
        parts.append(text(at(rows, 0)[0], bottom + 18, str(rows), size=12, anchor="middle"))
    for name, values, color in (("ONNX Runtime's kernels", STOCK, RED), ("native operators", NATIVE, BLUE)):
        points = [at(rows, ms / values[0]) for rows, ms in zip(ROWS, values, strict=True)]
        parts.append(line(points, color=color, width=2.4))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>' for x, y in points]
        parts.append(text(points[-1][0] + 10, points[-1][1] + 5, name, size=13, color=color))
    tau = 2.0
    parts.append(line([at(1, tau), at(16, tau)], color=GREEN, width=1.4))
    parts.append(text(left + 10, at(1, tau)[1] - 8, "tau = 2: below it pays", size=13, color=GREEN))
    parts.append(text(left + wide / 2, bottom + 42, "rows verified in one call (N + 1)", size=13, anchor="middle"))
    parts.append(text(left - 40, 30, "time of a verification, in multiples of one row", size=13))
    return svg(830, 360, "What verifying several rows costs", parts)


def exactness() -> str:
    """Why one query row and several can part, and how the chain form and the native operators avoid it."""
    columns = (
        ("stock kernels", RED, "1 row: sums in one order", "4 rows: in another", "differ by 1e-7: not exact"),
        ("chain form", GREEN, "1 row + a copy: 2 rows", "4 rows + a copy: 5", "the same bits, chains only"),
        ("native operators", BLUE, "each row: its keys in", "path order, in any company", "the same bits, trees too"),
    )  # fmt: skip
    parts = []
    for i, (name, color, *lines, verdict) in enumerate(columns):
        x = 20.0 + 275 * i
        parts += [box(x, 20, 260, 150, fill="#ffffff", stroke=color), text(x + 15, 48, name, size=15, color=color)]
        parts += [text(x + 15, 82 + 24 * j, words, size=13) for j, words in enumerate(lines)]
        parts.append(text(x + 15, 148, verdict, size=13, color=color))
    return svg(860, 190, "Three ways to run an attention, and which keep the bits", parts)


PICTURES = {"tap.svg": tap, "tree.svg": tree, "cost.svg": cost, "exactness.svg": exactness}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
