"""Draw the 80 small changes of `tools/mutants.py`.

Give it files of coverage.py's data of the tests, whose contexts are the tests' names; it prints
JSON without results.
"""

import ast
import json
import random
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

import coverage

from mutants import functions, places

ROOMS = {"engine": 12, "text": 11, "prompts": 10, "dialects": 14, "backends": 23, "kernels": 10}
SWAPS = {"<": "<=", ">": ">=", "==": "!=", "and": "or", "+": "-", "True": "False", "is": "is not"}
SWAPS |= {new: old for old, new in SWAPS.items()} | {"*": "+", "/": "*", "//": "*", "%": "//"}
SWAPS |= {"not": "", "if": "if not", "elif": "elif not", "in": "not in"}
# "is not" and "not in" are two tokens; their first stays, their second is changed.
SWAPS.pop("is not")


def changes(path):
    """Yield (line number, changed line) of a file."""
    before = ""
    for token in tokenize.generate_tokens(path.open().readline):
        new = SWAPS.get(token.string)
        if token.string in ("+", "-", "*", "/", "%", "//") and not re.search(r"[\w)\]]$", before):
            new = None  # a sign, or stars of arguments
        if token.type == tokenize.NUMBER and token.string.isdecimal():
            new = str(int(token.string) + 1)
        if new is not None:
            (number, start), (_, end) = token.start, token.end
            line = path.read_text().splitlines()[number - 1]
            yield number, line[:start] + new + line[end:]
        before = token.string


def valid(text):
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


def main(outputs):
    tests, size = {}, Counter()  # which tests execute a line; how many lines a test executes
    for output in outputs:
        data = coverage.CoverageData(output)
        data.read()
        for file in data.measured_files():
            for number, names in data.contexts_by_lineno(file).items():
                tests.setdefault((file, number), set()).update({*names} - {""})
                size.update(names)
    chance, drawn = random.Random(20261127), []
    for room, share in ROOMS.items():
        found = []
        folder = Path("kernels") if room == "kernels" else Path("gpuscore", room)
        for path in sorted(folder.rglob("*.py")):
            spans = [*functions(ast.parse(path.read_text()))]
            for number, changed in changes(path):
                if names := tests.get((str(path.resolve()), number)):
                    name = next((name for name, a, b in spans if a <= number <= b), None)
                    found.append((path, name, number, changed, names))
        print(room, len(found), file=sys.stderr)
        while share:
            path, name, number, changed, names = found.pop(chance.randrange(len(found)))
            lines = path.read_text().splitlines()
            line, lines[number - 1] = lines[number - 1], changed
            if not name or not valid("\n".join(lines)):
                continue
            share -= 1
            by_size = sorted(names, key=lambda test: (size[test], test))
            each = {test.split("[")[0]: test for test in by_size[::-1]}  # with the fewest lines
            mutant = {"file": str(path), "function": name, "line": line.strip()}
            mutant["nth"] = places(path, name, line.strip()).index(number)
            mutant["change"] = changed.strip()
            mutant["tests"] = sorted(each.values(), key=by_size.index)[:40]
            drawn.append(mutant)
    json.dump(drawn, sys.stdout, indent=1)


main(sys.argv[1:])
