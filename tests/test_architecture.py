"""The two rooms: what each part of the package may import, and what every module promises, read from the source."""

import ast
import configparser
import sys
from pathlib import Path

import pytest

import grpo_ext

PACKAGE = Path(grpo_ext.__file__).parent
REPOSITORY = Path(__file__).parent.parent
MODULES = {
    ".".join(("grpo_ext", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in PACKAGE.rglob("*.py")
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def part(name: str) -> dict[str, ast.Module]:
    """The modules of one sub-package."""
    return {module: tree for module, tree in TREES.items() if module.startswith(f"grpo_ext.{name}.")}


def imports(module: str) -> set[str]:
    """Absolute names of what a module imports, wherever in it."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in grpo_ext.a.b starts at grpo_ext.a
            start = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            assert module == "grpo_ext.__init__", "imports that cannot be read here"
    return found


def reaches(module: str, *packages: str) -> set[str]:
    """What a module imports of these packages."""
    return {name for name in imports(module) for package in packages if (name + ".").startswith(package + ".")}


def test_the_readers_own_eyes():
    """Every part is there, and imports of every form are seen."""
    for name in ("objective", "training", "tasks"):
        assert len(part(name)) >= 4
    assert reaches("grpo_ext.training.trainer", "grpo_ext.objective")  # from ..objective import
    assert reaches("grpo_ext.training.trainer", "grpo_ext.training.preflight")  # from . import
    assert reaches("grpo_ext.training.trainer", "torch", "trl")  # import, from trl import


@pytest.mark.parametrize("module", sorted(part("objective")))
def test_the_objective_knows_torch_and_nothing_else(module):
    allowed = {"torch", *sys.stdlib_module_names}
    outside = {name for name in imports(module) if name.split(".")[0] not in allowed}
    assert all(name.startswith("grpo_ext.objective") for name in outside), outside


@pytest.mark.parametrize("module", sorted(part("tasks")))
def test_tasks_know_nothing_of_training(module):
    assert not reaches(module, "trl", "transformers", "accelerate", "deepspeed", "peft", "grpo_ext.training")


@pytest.mark.parametrize("module", sorted(part("training")))
def test_training_knows_no_task(module):
    assert not reaches(module, "grpo_ext.tasks", "examples")


@pytest.mark.parametrize("module", sorted(TREES))
def test_no_module_imports_verl(module):
    assert not reaches(module, "verl")


def waits_for_the_device(tree: ast.AST) -> list[str]:
    """Calls that move a tensor's value to the host, except in `Metric.__float__` and what runs once a step."""
    # Their selections need a number of tokens on the host: they are no part of a micro-batch's loss
    once_a_step = ("tokens_left_by_clip_cov", "tokens_held_by_kl_cov")
    allowed = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in once_a_step
        for node in ast.walk(function)
    } | {
        id(node)
        for metric in ast.walk(tree)
        if isinstance(metric, ast.ClassDef) and metric.name == "Metric"
        for function in metric.body
        if isinstance(function, ast.FunctionDef) and function.name == "__float__"
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in allowed:
            continue
        name = ast.unparse(node.func)
        method = name.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
        constant = all(isinstance(argument, ast.Constant) for argument in node.args)
        if method in ("item", "tolist", "cpu", "numpy") or (name in ("float", "int", "bool") and not constant):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_the_reader_sees_waits():
    tree = ast.parse("a = x.item()\nb = y.sum().tolist()\nc = float(z)\nd = float('inf')\ne = z.float()")
    assert len(waits_for_the_device(tree)) == 3


@pytest.mark.parametrize("module", sorted(part("objective")))
def test_the_objective_does_not_wait_for_the_device(module):
    assert not waits_for_the_device(TREES[module])


def public_without_docstring(module: str) -> list[str]:
    """Public functions, classes and methods of a module without one.

    A property is an attribute and needs none; a callback's event has its base's.
    """
    missing = [] if ast.get_docstring(TREES[module]) else ["the module"]

    def visit(owner: ast.AST, prefix: str, overrides: bool) -> None:
        for node in owner.body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            event = overrides and node.name.startswith("on_")
            attribute = not isinstance(node, ast.ClassDef) and "property" in map(ast.unparse, node.decorator_list)
            if not ast.get_docstring(node) and not event and not attribute:
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node, f"{prefix}{node.name}.", bool(node.bases))

    visit(TREES[module], "", False)
    return missing


@pytest.mark.parametrize("module", sorted(TREES))
def test_everything_public_has_a_docstring(module):
    assert not public_without_docstring(module)


def test_one_version():
    """setup.cfg reads the package's, so that there is one place to change; pip's record agrees if it is there."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    said = setup["metadata"]["version"]
    assert said in ("attr: grpo_ext.__version__", grpo_ext.__version__)
    (assigned,) = [
        node.value
        for node in TREES["grpo_ext.__init__"].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert ast.literal_eval(assigned) == grpo_ext.__version__


def test_every_public_name_is_where_it_is_said_to_be():
    for name in grpo_ext.__all__:
        assert getattr(grpo_ext, name) is not None
    assert set(grpo_ext.__all__) <= set(dir(grpo_ext))
