"""docs/images/architecture.svg shows every package once; a package that comes or goes must be placed in it.

python -m tests.test_architecture     # draws it anew
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/architecture.svg"
WIDTH, HEIGHT, LINE = 1000, 660, 17
ONCE, MANAGER, WORKER, SHARED = "#e8f0fe", "#fff3e0", "#e6f4ea", "#f3e8fd"


@dataclass(frozen=True)
class Box:
    """A frame with a title, a sentence, and the packages in it."""

    x: int
    y: int
    width: int
    title: str
    sentence: str
    packages: tuple[str, ...]
    fill: str

    @property
    def height(self) -> int:
        return 34 + LINE * (len(self.packages) + bool(self.sentence))

    def svg(self) -> str:
        texts = [f'<text x="{self.x + 10}" y="{self.y + 20}" class="t">{escape(self.title)}</text>']
        below = self.y + 20
        if self.sentence:
            below += LINE
            texts.append(f'<text x="{self.x + 10}" y="{below}" class="s">{escape(self.sentence)}</text>')
        for package in self.packages:
            below += LINE
            texts.append(f'<text x="{self.x + 10}" y="{below}" class="p">{escape(package)}</text>')
        frame = (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" fill="{self.fill}"/>'
        )
        return "\n".join((frame, *texts))


JOB = ("morph/jobs", "morph/data", "morph/losses.py", "morph/optimizers.py", "morph/trainers")
ENGINE = ("manager/engine", "manager/run", "manager/host", "manager/enrolment")
JOURNAL = tuple(f"manager/{name}" for name in ("journal", "report", "accounting", "dashboard", "trackers", "history"))
STEP = tuple(f"morph/runtime/{name}" for name in ("step", "state", "groups", "device"))
STATE = ("morph/runtime/pre_copy", "morph/runtime/followers", "morph/checkpoint")
BOXES = (
    Box(20, 20, 960, "Command line", "", ("morph/cli",), SHARED),
    Box(20, 120, 220, "Job", "what you write", JOB, ONCE),
    Box(20, 272, 220, "Cut and check", "once", ("morph/cutting", "morph/preflight", "morph/tracing"), ONCE),
    Box(20, 390, 220, "Measure", "once: makes the profile", ("calibrate",), ONCE),
    Box(20, 474, 220, "Simulate and plan", "shapes, windows, costs", ("simulator",), ONCE),
    Box(300, 120, 290, "Engine", "carries decisions out", ENGINE, MANAGER),
    Box(300, 255, 290, "Controller", "decide(state, event, now): pure", ("manager/controller",), MANAGER),
    Box(300, 339, 290, "Journal, and what reads it", "", JOURNAL, MANAGER),
    Box(300, 491, 140, "VMs", "from where", ("manager/providers", "manager/notices", "manager/injection"), MANAGER),
    Box(450, 491, 140, "What if", "without VMs", ("manager/simulation", "manager/rehearsal"), MANAGER),
    Box(680, 120, 300, "Worker", "one for each device", ("morph/runtime/process", "morph/runtime/workloads"), WORKER),
    Box(680, 221, 300, "A step of a stage", "forward, backward, sums, reductions", STEP, WORKER),
    Box(680, 356, 300, "State between workers", "", STATE, WORKER),
    Box(680, 457, 170, "In a rehearsal", "sleeps, not computes", ("morph/runtime/emulation",), WORKER),
    Box(860, 457, 120, "Own loops", "no pipelines", ("morph/elastic", "morph/spot", "manager/spot"), WORKER),
    Box(
        20, 608, 960, "All of them use: contract (values), link (connections), words, tables, pictures", "", (), SHARED
    ),
)
ALSO = (
    "morph/contract",
    "morph/link",
    "morph/pictures.py",
    "morph/tables.py",
    "morph/user_cache.py",
    "morph/words.py",
    "morph/yaml_files.py",
)
"""Small packages and modules that all others use; the last box names some."""
MODULE_OF_MANAGER = "manager/run_dir.py"
ARROWS = (
    (130, 256, 130, 272, "", False),
    (130, 374, 130, 390, "", False),
    (130, 458, 130, 474, "", False),
    (240, 500, 300, 295, "plans", False),
    (440, 239, 440, 255, "", True),
    (440, 323, 440, 339, "", False),
    (590, 150, 680, 150, "orders", False),
    (680, 180, 590, 180, "reports", False),
    (820, 205, 820, 221, "", True),
    (820, 340, 820, 356, "", True),
)


def packages() -> set[str]:
    """Return the packages of the first two levels, those of the runtime, and the modules on the same levels."""
    found = {"simulator", "calibrate"}
    for top in ("morph", "manager", "morph/runtime"):
        for path in (ROOT / top).iterdir():
            if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").is_file():
                found.add(f"{top}/{path.name}")
    return found - {"morph/runtime", MODULE_OF_MANAGER}


def arrow(x1: int, y1: int, x2: int, y2: int, label: str, both: bool) -> str:
    ends = 'marker-end="url(#a)"' + (' marker-start="url(#b)"' if both else "")
    text = f'<text x="{(x1 + x2) // 2 - 18}" y="{(y1 + y2) // 2 - 5}" class="s">{label}</text>' if label else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {ends}/>{text}'


def picture() -> str:
    """The whole picture, as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        "<style>text{font-family:Helvetica,Arial,sans-serif;fill:#202124}.t{font-size:14px;font-weight:bold}.s{font-size:12px;"
        "fill:#5f6368}.p{font-size:11.5px;font-family:Menlo,Consolas,monospace}rect{stroke:#9aa0a6}line{stroke:#5f6368;"
        "stroke-width:1.5}.h{font-size:13px;fill:#5f6368}</style>",
        '<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"><path d="M0,0L8,4L0,8z" '
        'fill="#5f6368"/></marker><marker id="b" markerWidth="8" markerHeight="8" refX="1" refY="4" orient="auto">'
        '<path d="M8,0L0,4L8,8z" fill="#5f6368"/></marker></defs>',
        f'<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff" style="stroke:none"/>',
        '<text x="20" y="106" class="h">once, on one machine</text>',
        '<text x="300" y="106" class="h">the manager: morph run</text>',
        '<text x="680" y="106" class="h">P x D workers, on VMs</text>',
        *(box.svg() for box in BOXES),
        *(arrow(*one) for one in ARROWS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def test_the_picture_shows_every_package_once() -> None:
    drawn = [package for box in BOXES for package in box.packages]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) | set(ALSO) == packages(), "place it in BOXES, and: python -m tests.test_architecture"


def test_no_box_covers_another_and_all_are_inside() -> None:
    for box in BOXES:
        assert box.x + box.width <= WIDTH
        assert box.y + box.height <= HEIGHT
        for other in BOXES:
            apart = box.x + box.width <= other.x or other.x + other.width <= box.x
            apart = apart or box.y + box.height <= other.y or other.y + other.height <= box.y
            assert box is other or apart, (box.title, other.title)


def test_the_picture_in_the_documentation_is_the_one_that_is_drawn() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "python -m tests.test_architecture draws it anew"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
