"""The picture of rooms and floors, drawn from the table in CONTRIBUTING.md: ``python -m docs.rooms`` writes it."""

from __future__ import annotations

import re
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "assets" / "rooms.svg"
ROW = re.compile(r"^\| (\d+) \| `(\w+)/?(?:\.py)?` \| ([^|]+) \|", re.MULTILINE)
COLORS = ("#e3ecf7", "#e6f2e6", "#fdf2d8", "#f8e3dc", "#ece4f5", "#e0f1f1", "#f6e3ee", "#eeeeda", "#e4e6ea", "#ffffff")
WIDTH, HEIGHT, GAP, LEFT = 860, 66, 10, 40


def rooms() -> list[tuple[int, str, str]]:
    """(floor, room, what it knows) of each row of the table."""
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
    return [(int(floor), room, knows.replace("`", "")) for floor, room, knows in rows]


def box(x: float, y: float, width: float, color: str, room: str, knows: str) -> list[str]:
    """One room: its name, and at most two lines of what it knows."""
    lines = textwrap.wrap(knows, int(width / 6.1))[:2]
    out = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT - GAP}" rx="5" fill="{color}" stroke="#777"/>',
        f'<text x="{x + 10:g}" y="{y + 18:g}" class="name">{escape(room)}</text>',
    ]
    return out + [
        f'<text x="{x + 10:g}" y="{y + 33 + 13 * i:g}" class="knows">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]


def picture() -> str:
    """The SVG: one row of boxes for each floor, the lowest at the bottom."""
    by_floor: dict[int, list[tuple[str, str]]] = {}
    for floor, room, knows in rooms():
        by_floor.setdefault(floor, []).append((room, knows))
    top = max(by_floor)
    height = HEIGHT * (top + 1) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<style>.name{font-size:14px;font-weight:bold}.knows{font-size:11px;fill:#333}.floor{font-size:13px;fill:#555}</style>",
    ]
    for floor, row in sorted(by_floor.items(), reverse=True):
        y = HEIGHT * (top - floor) + GAP
        out.append(f'<text x="8" y="{y + 32}" class="floor">{floor}</text>')
        width = (WIDTH - LEFT - GAP * len(row)) / len(row)
        for i, (room, knows) in enumerate(row):
            out += box(LEFT + i * (width + GAP), y, width, COLORS[floor % len(COLORS)], room, knows)
    note = "A room imports only from rooms on lower floors."
    out.append(f'<text x="{LEFT}" y="{height - 10}" class="floor">{note}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE.relative_to(ROOT))
