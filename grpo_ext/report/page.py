"""The page: its sections put together, self-contained and closed to anything that is not its own."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from .assets import SCRIPT, STYLE
from .curves import curves
from .markup import escape, line_class, run_tag
from .readings import answers, completions
from .runs import Run
from .tables import default_page, settings, summary, title, warnings

DOCTYPE = "<!doctype html>"


def write_report(runs: Sequence[Run], output: str | Path | None = None) -> Path:
    """Write one HTML page about one or several runs; an earlier page there is replaced, at once.

    Args:
        runs: as `read_runs` reads them.
        output: the page; `None`: `report.html`, of one run in its folder, of several in the current folder.

    Returns:
        The page's path.

    Raises:
        ValueError: `output` is something else than a page; nothing is written.
        OSError: it cannot be written.
    """
    page = Path(output) if output is not None else default_page(runs)
    _check_target(page)
    content = render(runs)
    scratch = page.with_name(page.name + ".tmp")
    try:
        scratch.write_text(content, encoding="utf-8")
        scratch.replace(page)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise OSError(f"{page} cannot be written ({error.strerror}); choose another place with --output") from error
    return page


def _check_target(page: Path) -> None:
    if page.is_dir():
        raise ValueError(f"{page} is a folder; give the page a name, such as {page / 'report.html'}")
    if not page.parent.is_dir():
        raise ValueError(
            f"{page} cannot be written: there is no folder {page.parent}; make it, or choose another --output"
        )
    if page.exists() and page.is_file() and page.stat().st_size:
        with page.open("rb") as file:
            if file.read(len(DOCTYPE)).lower() != DOCTYPE.encode():
                raise ValueError(f"{page} exists and is no HTML page; choose another --output")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def render(runs: list[Run]) -> str:
    """The page as text. It loads nothing, and the browser runs no script and no style but its own."""
    many = len(runs) > 1
    hide = "".join(f"body:has(#show{i}:not(:checked)) .r{i}{{display:none}}" for i in range(len(runs))) if many else ""
    style = STYLE + hide
    # Should a text ever slip through unescaped, the browser would still not run it
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(SCRIPT)}; base-uri 'none'; form-action 'none'"
    )
    sections = {
        "warnings": ("Warnings", warnings(runs)),
        "curves": ("Curves", curves(runs)),
        "completions": ("Completions", completions(runs)),
        "answers": ("Greedy answers before and after training", answers(runs)),
        "settings": ("Settings", settings(runs)),
    }
    sections = {name: (heading, content) for name, (heading, content) in sections.items() if content}
    links = "".join(f'<a href="#{name}">{heading.split(" before")[0]}</a>' for name, (heading, _) in sections.items())
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{content}</section>' for name, (heading, content) in sections.items()
    )
    return (
        f'{DOCTYPE}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title(runs))}</title><style>{style}</style></head>\n"
        f"<body><header><h1>{escape(title(runs))}</h1><nav>{links}</nav></header>{_legend(runs) if many else ''}"
        f'<main><section id="summary">{summary(runs)}</section>{body}</main>'
        f"<footer>Written by grpo_ext {__version__}.</footer><script>{SCRIPT}</script></body></html>\n"
    )


def _legend(runs: list[Run]) -> str:
    items = "".join(
        f'<label><input type="checkbox" id="show{i}" checked>'
        f'<svg class="sample" viewBox="0 0 28 10"><g class="line {line_class(i).replace(f"r{i} ", "")}">'
        f'<polyline points="0,5 28,5"/></g></svg>{run_tag(i, run.label, False)}{escape(run.label)}</label>'
        for i, run in enumerate(runs)
    )
    return f'<div class="legend"><span>Runs shown:</span>{items}</div>'
