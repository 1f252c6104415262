"""The notebooks: what is kept in them, and that each runs from top to bottom in a fresh kernel."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
SECONDS = 600  # for one cell, on a busy machine
LARGEST = 600_000  # bytes of a notebook

# An absolute path: of the machine that ran it, or of a temporary folder
LOCAL_PATH = re.compile(r"(?<![\w.:/*])/[\w.-]+/[\w./-]+|\b[A-Z]:\\[\w.-]+")


# Looks at each figure in the moment in which the notebook renders it, since it is closed right after.
WATCH_FIGURES = """
from matplotlib.backend_bases import FigureCanvasBase as _Canvas

_rendered, _unlabelled, _print_figure = 0, [], _Canvas.print_figure


def _sides_without_label(axes):
    figure = axes.figure
    if hasattr(axes, "_colorbar"):
        return [] if axes.get_xlabel() or axes.get_ylabel() else ["colorbar"]
    without = []
    for side in ("x", "y"):
        shared = getattr(axes, f"get_shared_{side}_axes")().get_siblings(axes)
        of_figure = getattr(figure, f"get_sup{side}label")()
        if not of_figure and not any(getattr(other, f"get_{side}label")() for other in shared):
            without.append(side)
    return without


def _watching(canvas, *args, **kwargs):
    global _rendered
    _rendered += 1
    for _axes in canvas.figure.axes:
        if _axes.get_visible() and _axes.axison and _sides_without_label(_axes):
            _unlabelled.append(f"figure {_rendered}, {_axes.get_title()!r}: {_sides_without_label(_axes)}")
    return _print_figure(canvas, *args, **kwargs)


_Canvas.print_figure = _watching
"""
REPORT_FIGURES = "import json as _json; print(_json.dumps([_rendered, _unlabelled]))"


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def images(cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def output_text(cell) -> str:
    """All text of a cell's outputs, without the images."""
    texts = []
    for output in cell.outputs:
        texts += ["".join(output.get("text", ""))]
        texts += ["".join(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(texts)


def execute(notebook, folder: Path, monkeypatch) -> None:
    """Run all cells in a fresh kernel that reads no settings of the user's."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own: inline
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()


def check_kept(notebook) -> None:
    """That outputs are kept, of a run from top to bottom without errors, and tell nothing of the machine."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to bottom"
    for cell in cells:
        assert all(output.output_type != "error" for output in cell.outputs), cell.source
        assert all(output.get("name") != "stderr" for output in cell.outputs), output_text(cell)
        if re.search(r"^plt\.show\(\)", cell.source, re.MULTILINE):
            assert images(cell), f"a cell that draws has no image:\n{cell.source}"
    found = [LOCAL_PATH.search(output_text(cell)) for cell in cells]
    assert not any(found), [match[0] for match in found if match]
    sources = [LOCAL_PATH.search(cell.source) for cell in notebook.cells]
    assert not any(sources), [match[0] for match in sources if match]


def check_explained(notebook) -> None:
    """That markdown right before each figure says in one sentence what to see."""
    for before, cell in zip(notebook.cells, notebook.cells[1:], strict=False):
        if cell.cell_type == "code" and images(cell):
            assert before.cell_type == "markdown", f"no text before the figure of:\n{cell.source}"
            said = before.source.partition("What to see:")[2].split("\n\n")[0].strip("* \n")
            assert said.endswith("."), f"no 'What to see' before the figure of:\n{cell.source}"
            assert len(re.findall(r"[.!?](?:\s|$)", said)) == 1, f"more than a sentence: {said}"


def test_there_are_notebooks():
    assert {"01_objective", "03_lora"} <= {path.stem for path in PATHS}


def test_outputs_are_kept_and_explained(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    check_kept(notebook)
    check_explained(notebook)


def test_it_runs_and_labels_the_axes_of_every_figure(path, tmp_path, monkeypatch):
    kept, run = (nbformat.read(path, as_version=4) for _ in range(2))
    run.cells.insert(0, nbformat.v4.new_code_cell(WATCH_FIGURES))
    run.cells.append(nbformat.v4.new_code_cell(REPORT_FIGURES))
    execute(run, tmp_path, monkeypatch)  # raises with the cell and its traceback where one fails
    rendered, unlabelled = json.loads(output_text(run.cells[-1]))
    assert not unlabelled
    assert rendered == sum(map(images, code_cells(kept)))
    for before, now in zip(code_cells(kept), code_cells(run)[1:-1], strict=True):
        assert images(now) == images(before), before.source
        assert bool(output_text(now)) == bool(output_text(before)), before.source
        assert all(output.get("name") != "stderr" for output in now.outputs), output_text(now)


# What the checks would catch


def small_notebook(*sources: str):
    cells = [nbformat.v4.new_markdown_cell("**What to see:** a line.")]
    return nbformat.v4.new_notebook(cells=cells + [nbformat.v4.new_code_cell(source) for source in sources])


DRAW = "import matplotlib.pyplot as plt\nfigure, axis = plt.subplots()\naxis.plot([1, 2])\n{}\nplt.show()"


def test_the_watch_sees_axes_without_labels(tmp_path, monkeypatch):
    labelled = DRAW.format("axis.set(xlabel='x', ylabel='y')")
    by_figure = DRAW.format("figure.supxlabel('x'); figure.supylabel('y')")
    notebook = small_notebook(WATCH_FIGURES, labelled, by_figure, DRAW.format("axis.set(xlabel='x')"), REPORT_FIGURES)
    execute(notebook, tmp_path, monkeypatch)
    rendered, unlabelled = json.loads(output_text(notebook.cells[-1]))
    assert rendered == 3
    assert unlabelled == ["figure 3, '': ['y']"]


def kept_notebook():
    """What `check_kept` and `check_explained` accept: one cell that draws, with its image."""
    notebook = small_notebook(DRAW)
    cell = notebook.cells[1]
    cell.execution_count = 1
    cell.outputs = [nbformat.v4.new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})]
    return notebook


def stream(text: str, name: str = "stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cell: cell.update(outputs=[]),
        lambda cell: cell.update(execution_count=None),
        lambda cell: cell.update(execution_count=2),
        lambda cell: cell.outputs.append(nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])),
        lambda cell: cell.outputs.append(stream("a warning", "stderr")),
        lambda cell: cell.outputs.append(stream("saved in /home/someone/final")),
        lambda cell: cell.outputs.append(stream("saved in /tmp/tmpab12/final")),
    ],
    ids=["no outputs", "not run", "out of order", "error", "stderr", "home", "temporary folder"],
)
def test_a_spoilt_notebook_is_refused(spoil):
    notebook = kept_notebook()
    check_kept(notebook)
    spoil(notebook.cells[1])
    with pytest.raises(AssertionError):
        check_kept(notebook)


@pytest.mark.parametrize("text", ["", "A figure.", "**What to see:** one. And another."])
def test_a_figure_without_its_sentence_is_refused(text):
    notebook = kept_notebook()
    check_explained(notebook)
    notebook.cells[0].source = text
    with pytest.raises(AssertionError):
        check_explained(notebook)
