"""80 small changes of the code, and whether tests that execute the changed line see them.

`tools/mutants.json` holds the changes, their tests, and what was found before the code was made
smaller. Run in the root with the Python of the tests, `tools/mutants.py` makes each change again,
where its function and line still are, and counts; with --record it writes what it finds.
"""

import ast
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

RECORD = Path("tools/mutants.json")
INTERPRETED = "tests/kernels/triton_interpreter"  # with TRITON_INTERPRET=1


def functions(node, name=""):
    """Yield (name, first line, last line) of all functions below `node`, inner ones first."""
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}".strip(".") if hasattr(child, "name") else name
        yield from functions(child, inner)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner, child.lineno, child.end_lineno


def places(path, function, line):
    """Return the numbers of the lines of a function that read `line`."""
    text = path.read_text()
    spans = [(first, last) for name, first, last in functions(ast.parse(text)) if name == function]
    lines = text.splitlines()
    return [n for a, b in spans for n in range(a, b + 1) if lines[n - 1].strip() == line]


def place(mutant):
    """Return (file, line number) of a change, also in another file, or None if it has gone."""
    files = [p for room in ("gpuscore", "kernels") for p in Path(room).rglob("*.py")]
    for path in sorted(files, key=lambda path: str(path) != mutant["file"]):
        if found := places(path, mutant["function"], mutant["line"]):
            return path, found[min(mutant["nth"], len(found) - 1)]
    return None


def pytest(tests, *options):
    """Run tests; return what pytest says, or None if they hang."""
    said = ""
    for flag in "01":
        if chosen := [test for test in tests if test.startswith(INTERPRETED) == (flag == "1")]:
            command = ["timeout", "300", sys.executable, "-P", "-m", "pytest", "-q", *options]
            environment = os.environ | {"TRITON_INTERPRET": flag}
            ran = subprocess.run(
                command + chosen, env=environment, stdout=subprocess.PIPE, text=True
            )
            if ran.returncode == 124:
                return None
            said += ran.stdout
    return said


def failed(tests):
    said = pytest(tests, "--maxfail=3", "-rfE", "--tb=no")
    return tests if said is None else re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.M)


def failed_with(mutant, path, number):
    """Return the tests that fail with the change, and without it do not."""
    kept, times = path.read_text(), path.stat()
    lines = kept.splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(mutant["line"], mutant["change"])
    try:
        path.write_text("".join(lines))
        os.utime(path, (0, number))  # no .pyc is of that time
        seen = failed(mutant["tests"])
    finally:
        path.write_text(kept)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    broken = failed(seen) if seen else []
    return [test for test in seen if test not in broken]


def present(test, known):
    """Return the test, or where it has gone those of its function, file or folder."""
    function, file = test.split("[")[0], test.split("::")[0]
    if test in known:
        return [test]
    for start in (f"{function}[", function, f"{file}::", f"{Path(file).parent}/"):
        if found := [name for name in known if name.startswith(start)]:
            break
    print(f"{test} has gone: tests of {start} take its place")
    return found[:10]


def main():
    record = "--record" in sys.argv
    mutants, counts = json.loads(RECORD.read_text()), collections.Counter()
    known = dict.fromkeys(pytest(["tests", INTERPRETED], "--collect-only").splitlines())
    for mutant in mutants:
        tests = [found for test in mutant["tests"] for found in present(test, known)]
        mutant["tests"] = list(dict.fromkeys(tests))
    for mutant in [mutant for mutant in mutants if not record or "result" not in mutant]:
        seen = failed_with(mutant, *found) if (found := place(mutant)) else None
        result = "gone" if seen is None else "killed" if seen else "alive"
        counts[result] += 1
        if record:
            mutant |= {"tests": [*dict.fromkeys(seen + mutant["tests"])][:5], "result": result}
            RECORD.write_text(json.dumps(mutants, indent=1) + "\n")
        elif mutant["result"] != result:
            print(f"{result}: {mutant}")
    print(counts)


if __name__ == "__main__":
    main()
