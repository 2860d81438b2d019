"""Counts what makes code dense, in the package and in TRL's trainers beside it: a measure to look at, not a gate.

python .ci/plainness.py                     the package, and TRL's trainers
python .ci/plainness.py benchmarks tests    these files and folders instead
python .ci/plainness.py --files             and a row for each file
python .ci/plainness.py --places            and where each tuple assignment, long line etc. stands

The columns:

code lines   lines that are neither blank nor a comment nor part of a docstring
tuples       assignments of a tuple to a tuple (`a, b = x, y`) per 1,000 code lines
operations   calls, subscripts, attributes, operators, conditional expressions and comprehensions in functions,
             per line of these functions; lines that only close brackets do not count
long         lines of more than 119 characters
nested       conditional expressions inside another one
lambdas      lambdas that are assigned to a name
"""

import argparse
import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
MAX_LINE_LENGTH = 119
OPERATIONS = (
    ast.Call,
    ast.Subscript,
    ast.Attribute,
    ast.BinOp,
    ast.BoolOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
HEADER = f"{'':<44}{'code lines':>12}{'tuples':>8}{'operations':>12}{'long':>6}{'nested':>8}{'lambdas':>9}"


@dataclass
class Counts:
    """Counts of one file or of several."""

    code_lines: int = 0
    lines_in_functions: int = 0
    operations_in_functions: int = 0
    tuple_assignments: list[str] = field(default_factory=list)
    long_lines: list[str] = field(default_factory=list)
    nested_conditionals: list[str] = field(default_factory=list)
    named_lambdas: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        self.code_lines += other.code_lines
        self.lines_in_functions += other.lines_in_functions
        self.operations_in_functions += other.operations_in_functions
        self.tuple_assignments += other.tuple_assignments
        self.long_lines += other.long_lines
        self.nested_conditionals += other.nested_conditionals
        self.named_lambdas += other.named_lambdas

    def row(self, name: str) -> str:
        tuples = 1000 * len(self.tuple_assignments) / max(self.code_lines, 1)
        operations = self.operations_in_functions / max(self.lines_in_functions, 1)
        long = len(self.long_lines)
        nested = len(self.nested_conditionals)
        lambdas = len(self.named_lambdas)
        return f"{name:<44}{self.code_lines:>12,}{tuples:>8.1f}{operations:>12.2f}{long:>6}{nested:>8}{lambdas:>9}"

    def places(self) -> list[str]:
        """Each place that is counted, with its file and line."""
        kinds = {
            "tuple assignment": self.tuple_assignments,
            "long line": self.long_lines,
            "nested conditional": self.nested_conditionals,
            "named lambda": self.named_lambdas,
        }
        return [f"{place}: {kind}" for kind, places in kinds.items() for place in places]


def count_file(path: Path) -> Counts:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = lines_of_code(source, tree)
    counts = Counts(code_lines=len(lines))

    for number, line in enumerate(source.splitlines(), start=1):
        if len(line) > MAX_LINE_LENGTH:
            counts.long_lines.append(f"{path}:{number}")

    for node in ast.walk(tree):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if is_tuple_assignment(node):
            counts.tuple_assignments.append(place)
        elif is_named_lambda(node):
            counts.named_lambdas.append(place)
        elif is_nested_conditional(node):
            counts.nested_conditionals.append(place)

    for function in outer_functions(tree):
        nodes = list(ast.walk(function))
        lines_with_a_node = {node.lineno for node in nodes if isinstance(node, ast.stmt | ast.expr | ast.arg)}
        counts.lines_in_functions += len(lines_with_a_node & lines)
        counts.operations_in_functions += sum(isinstance(node, OPERATIONS) for node in nodes)
    return counts


def is_tuple_assignment(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def is_named_lambda(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda)


def is_nested_conditional(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def lines_of_code(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that are neither blank nor a comment nor part of a docstring."""
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            docstring_lines.update(range(docstring.lineno, last_line(docstring) + 1))

    lines: set[int] = set()
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#") and number not in docstring_lines:
            lines.add(number)
    return lines


def outer_functions(node: ast.AST) -> list[ast.AST]:
    """Functions and methods below `node`, without those inside another one."""
    functions: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(child)
        else:
            functions += outer_functions(child)
    return functions


def last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def short_name(path: Path) -> str:
    """The path within the repository, or the last two parts of any other."""
    path = path.resolve()
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return "/".join(path.parts[-2:])


def folder_of_trl_trainers() -> Path:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        raise SystemExit("error: TRL is not installed")
    return Path(spec.origin).parent / "trainer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="Files and folders instead of the package and TRL.")
    parser.add_argument("--files", action="store_true", help="Also print a row for each file.")
    parser.add_argument("--places", action="store_true", help="Also list the places.")
    options = parser.parse_args()

    print(HEADER)
    for path in options.paths or [ROOT / "trl_dataeff", folder_of_trl_trainers()]:
        total = Counts()
        for file in python_files(path):
            counts = count_file(file)
            total.add(counts)
            if options.files and path.is_dir():
                print(counts.row(short_name(file)))
        print(total.row(short_name(path)))
        if options.places:
            print("\n".join(total.places()))


if __name__ == "__main__":
    main()
